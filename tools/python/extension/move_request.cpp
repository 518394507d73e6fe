#include "move_request.h"

#include <memory>
#include <utility>

#include "object_store/files.h"
#include "reshard/journaled_options.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::python {
namespace {

using formats::CreateOptions;
using formats::Format;
using formats::MergePreference;
using reshard::JournaledOptions;
using reshard::PlanOptions;
using reshard::Relaxation;

constexpr std::uint64_t kMaxOptionFileNbytes = std::uint64_t{256} << 20;
// The tool's name, so that tool and package can resume each other's work.
constexpr const char* kTool = "ckpt-reshard " TESSERA_VERSION;

[[noreturn]] void refuse(const std::string& option, const std::string& expected,
                         const std::string& found) {
  throw Error::expected(ErrorKind::invalid_argument, {}, option, expected,
                        "'" + printable(found) + "'");
}

/// Returns the text of the file at `path`; an empty text if `path` is empty.
std::string read_option_file(const std::string& path) {
  return path.empty() ? path : read_file(FileSystem::posix(), path, kMaxOptionFileNbytes);
}

template <class T>
void append(std::vector<T>& items, const std::vector<T>& more) {
  items.insert(items.end(), more.begin(), more.end());
}

std::optional<DType> parse_cast(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  const auto dtype = parse_dtype(*name);
  if (!dtype) refuse("cast", dtype_expectation(*name), *name);
  if (is_complex(*dtype)) refuse("cast", "a dtype of real numbers", *name);
  return dtype;
}

reshard::OptimizerNames parse_names(const std::string& name) {
  const auto names = reshard::parse_optimizer_names(name);
  if (!names) refuse("optimizer_names", "as-stored, canonical or torchrec", name);
  return *names;
}

reshard::OnOverflow parse_overflow(const std::string& name) {
  const auto on_overflow = reshard::parse_on_overflow(name);
  if (!on_overflow) refuse("on_overflow", "refuse, saturate or infinity", name);
  return *on_overflow;
}

MergePreference parse_preference(const std::optional<std::string>& name) {
  if (!name) return MergePreference::none;
  if (*name != "first" && *name != "last") refuse("prefer", "first or last", *name);
  return *name == "first" ? MergePreference::first : MergePreference::last;
}

reshard::ExtraFilesOptions extra_files_options(const MoveOptions& options,
                                               MergePreference preference) {
  const auto policy = reshard::parse_extra_files_policy(options.extra_files);
  if (!policy) refuse("extra_files", "carry, leave or refuse", options.extra_files);
  if (!options.extra_files_folder.empty() && policy != reshard::ExtraFilesPolicy::carry) {
    refuse("extra_files_from", "extra_files='carry'", options.extra_files);
  }
  return {.policy = *policy,
          .max_nbytes = options.extra_files_nbytes,
          .folder = options.extra_files_folder,
          .preference = preference,
          .changes_tensors = options.drop_optimizer,
          .is_converted = !options.recipe_path.empty()};
}

CreateOptions create_options(const MoveOptions& options, Format format) {
  CreateOptions create;
  create.format = format;
  create.keeps_names = options.recipe_path.empty() && options.extra_files_folder.empty();
  create.overwrite = options.overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse;
  create.native = compression_to_write(options.compress, format);
  if (!options.device_mesh.empty()) {
    if (!formats::traits_of(format).has_device_mesh) {
      refuse("device_mesh",
             "to=" + formats::writable_formats_in_words(
                         [](const formats::FormatTraits& of) { return of.has_device_mesh; }),
             std::string(format.name()));
    }
    create.device_mesh = formats::DeviceMeshOptions::parse(options.device_mesh);
  }
  if (!options.base.empty() && !formats::traits_of(format).has_base) {
    refuse("base", "to=" + formats::writable_formats_in_words([](const formats::FormatTraits& of) {
                     return of.has_base;
                   }),
           std::string(format.name()));
  }
  if (options.changed_rows && options.base.empty()) refuse("changed_rows", "base too", "no base");
  if (options.max_shard_nbytes == 0) return create;
  if (!formats::traits_of(format).has_several_files) {
    refuse("max_shard_size",
           "to=" + formats::writable_formats_in_words(
                       [](const formats::FormatTraits& of) { return of.has_several_files; }),
           std::string(format.name()));
  }
  create.safetensors.max_shard_nbytes = options.max_shard_nbytes;
  return create;
}

/// Returns the options that the plan depends on, except those that only a merge has.
JournaledOptions journaled_options(const MoveOptions& options, const Sources& sources) {
  const reshard::NamePrefixes& prefixes = sources.prefixes;
  JournaledOptions given;
  given.optimizer_names = parse_names(options.optimizer_names);
  given.cast = parse_cast(options.cast);
  given.on_overflow = parse_overflow(options.on_overflow);
  given.world_size = options.world_size;
  given.strategy = options.strategy.value_or("");
  given.table_plan = read_option_file(options.plan_path);
  given.mesh = read_option_file(options.mesh_path);
  if (sources.like) given.like = reshard::layout_digest(*sources.like);
  given.units = read_option_file(options.units_path);
  given.flat_layout = read_option_file(options.flat_layout_path);
  given.as_dict = options.as_dict;
  if (sources.optimizer_params) given.optimizer_params = sources.optimizer_params->names;
  if (sources.recipe) {
    given.recipe = recipe::identity_text(sources.recipe->recipe, sources.recipe->options);
  }
  given.inverse = options.inverse;
  given.set = options.settings;
  given.only = options.only;
  append(given.only, prefixes.patterns());
  given.renames = options.renames;
  if (!options.keep_prefix) given.prefix_removals = prefixes.removals();
  given.drop_optimizer = options.drop_optimizer;
  given.allow_missing = options.allow_missing;
  given.allow_lossy = options.allow_lossy;
  given.as_is = options.as_is;
  return given;
}

PlanOptions plan_options(const MoveOptions& options, const JournaledOptions& given,
                         const Sources& sources, Format format) {
  PlanOptions plan;
  plan.format = format;
  plan.world_size = given.world_size;
  plan.strategy = given.strategy;
  plan.only = NameSelection(given.only);
  append(plan.renames, given.renames);
  append(plan.renames, given.prefix_removals);
  plan.optimizer_names = given.optimizer_names;
  plan.cast = given.cast;
  plan.on_overflow = given.on_overflow;
  if (given.drop_optimizer) plan.optimizer = reshard::OptimizerSelection::leave_out;
  if (given.allow_missing) plan.missing = Relaxation::allow;
  if (given.allow_lossy) plan.lossy = Relaxation::allow;
  if (given.as_is) plan.part = Relaxation::allow;
  if (!options.plan_path.empty()) {
    plan.table_plan = TablePlan::from_json(given.table_plan, options.plan_path);
  }
  if (!options.mesh_path.empty()) {
    plan.mesh = MeshLayout::from_json(given.mesh, options.mesh_path);
  }
  plan.like = sources.like;
  if (!options.units_path.empty()) {
    plan.units = flat_units_from_json(given.units, options.units_path);
  }
  return plan;
}

/// Returns the options of the journal; nothing if the move needs none, because its work is not kept
/// after an interruption.
std::optional<formats::JournalOptions> journal_options(const MoveOptions& options,
                                                       const Sources& sources,
                                                       JournaledOptions given) {
  if (!options.resume && !options.discard && !options.part) return std::nullopt;
  given.preference = sources.preference;
  if (sources.paths.size() > 1) {
    for (const auto& source : sources.paths) given.source_prefixes.push_back(source.prefix);
  }
  formats::JournalOptions journal;
  journal.identity = reshard::identity_of_options(given);
  journal.identity["tool"] = kTool;
  if (options.resume) journal.kept_work = formats::KeptWork::resume;
  if (options.discard) journal.kept_work = formats::KeptWork::discard;
  return journal;
}

}  // namespace

formats::Format format_to_write(const std::optional<std::string>& name,
                                const std::string& destination) {
  if (!name) return formats::format_for_destination(destination);
  const auto format = formats::parse_format(*name);
  if (!format || !formats::traits_of(*format).can_be_written)
    refuse("to", formats::writable_formats_in_words(), *name);
  return *format;
}

formats::NativeWriteOptions compression_to_write(const std::string& text, formats::Format format) {
  const auto options = formats::parse_compression(text);
  if (!options) refuse("compress", std::string(formats::kCompressions), text);
  if (options->compression != formats::NativeWriteOptions::Compression::none &&
      !formats::traits_of(format).has_compression) {
    refuse("compress", "none, because only the native format is compressed", text);
  }
  return *options;
}

std::optional<RecipeRequest> read_recipe(const std::string& path, bool inverse,
                                         const std::vector<std::string>& settings,
                                         const std::vector<std::string>& checkpoints,
                                         const std::string& model_folder) {
  if (path.empty()) {
    if (inverse || !settings.empty())
      refuse(inverse ? "inverse" : "set", "recipe=FILE with it", "");
    return std::nullopt;
  }
  RecipeRequest request{recipe::Recipe::read(FileSystem::posix(), path), {}};
  if (inverse) request.options.direction = recipe::Direction::inverse;
  for (const std::string& setting : settings) recipe::add_setting(request.options, setting);
  recipe::read_config(object_store::files(), request.recipe, checkpoints, model_folder,
                      request.options);
  return request;
}

MoveRequest make_move_request(std::vector<formats::MergePath> sources, std::string destination,
                              const MoveOptions& options) {
  MoveRequest request{.sources = {.paths = std::move(sources),
                                  .preference = parse_preference(options.prefer),
                                  .flat_layout_path = options.flat_layout_path,
                                  .as_dict = options.as_dict,
                                  .prefixes = reshard::NamePrefixes(options.prefixes)},
                      .destination = std::move(destination),
                      .base = options.base,
                      .row_changes = options.changed_rows ? reshard::RowChanges::write_rows
                                                          : reshard::RowChanges::write_piece,
                      .spool = options.spool,
                      .dry_run = options.dry_run};
  const Format format = format_to_write(options.to, request.destination);
  request.create = create_options(options, format);
  if (!options.optimizer_params.empty()) {
    request.sources.optimizer_params =
        reshard::read_optimizer_params(FileSystem::posix(), options.optimizer_params);
  }
  std::vector<std::string> paths;
  for (const auto& source : request.sources.paths) paths.push_back(source.path);
  request.sources.recipe = read_recipe(options.recipe_path, options.inverse, options.settings,
                                       paths, options.extra_files_folder);
  if (!options.like_path.empty()) {
    request.sources.like = std::make_shared<const formats::CheckpointContents>(
        formats::open_checkpoint(object_store::files(), options.like_path)->contents());
  }
  JournaledOptions given = journaled_options(options, request.sources);
  request.plan = plan_options(options, given, request.sources, format);
  request.create.journal = journal_options(options, request.sources, std::move(given));
  request.extra_files = extra_files_options(options, request.sources.preference);
  request.execute = {.memory_nbytes = options.memory_nbytes, .num_threads = options.num_threads};
  if (options.part) {
    request.worker = {.share = options.part->first,
                      .num_shares = options.part->second,
                      .other_shares = options.take_over
                                          ? reshard::SharedMoveOptions::OtherShares::take_over
                                          : reshard::SharedMoveOptions::OtherShares::leave};
  }
  return request;
}

}  // namespace tessera::python
