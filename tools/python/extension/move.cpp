#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "findings.h"
#include "jobs.h"
#include "python_value.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/merge.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/given_options.h"
#include "tessera/reshard/planner.h"
#include "watched_work.h"

namespace tessera::python {
namespace {

using formats::CheckpointReader;
using formats::CreateOptions;
using formats::Format;
using formats::KeptWork;
using formats::MergePath;
using formats::MergePreference;
using reshard::ExecuteOptions;
using reshard::GivenOptions;
using reshard::NamePrefixes;
using reshard::Plan;
using reshard::PlanOptions;
using reshard::Relaxation;

constexpr std::uint64_t kMaxOptionFileNbytes = std::uint64_t{256} << 20;
constexpr const char* kTool = "ckpt-reshard " TESSERA_VERSION;  // which goes on with our work, too

[[noreturn]] void refuse(const std::string& option, const std::string& expected,
                         const std::string& found) {
  throw Error::expected(ErrorKind::invalid_argument, {}, option, expected,
                        "'" + printable(found) + "'");
}

std::string read_option_file(const std::string& path) {
  return read_file(FileSystem::posix(), path, kMaxOptionFileNbytes);
}

/// What is moved: one checkpoint, or several as one.
struct Sources {
  std::vector<MergePath> paths;
  MergePreference preference = MergePreference::none;
  std::string flat_layout_path;  // of one alone
  NamePrefixes prefixes{};       // that must be there
};

/// What Python asked for.
struct Request {
  Sources sources;
  std::string destination;
  bool dry_run = false;
  PlanOptions plan{};
  CreateOptions create{};
  ExecuteOptions execute{};
};

/// What came of it.
struct Outcome {
  Plan plan;
  Format source_format{};
  std::uint64_t kept_nbytes = 0;
  std::string plan_digest;
  std::optional<std::string> left_over;  // what was replaced and could not be removed
};

std::vector<std::string> strings_of(const std::vector<nb::bytes>& texts) {
  std::vector<std::string> strings;
  for (const nb::bytes& text : texts) strings.push_back(string_of(text));
  return strings;
}

template <class T>
void append(std::vector<T>& items, const std::vector<T>& more) {
  items.insert(items.end(), more.begin(), more.end());
}

Format parse_format(const std::optional<std::string>& name, const std::string& destination) {
  if (!name) return formats::format_for_destination(destination);
  const auto format = formats::parse_format(*name);
  if (!format || !formats::traits_of(*format).can_be_written)
    refuse("to", formats::writable_formats_in_words(), *name);
  return *format;
}

formats::NativeWriteOptions parse_compression(const std::string& text, Format format) {
  const auto options = formats::parse_compression(text);
  if (!options) refuse("compress", std::string(formats::kCompressions), text);
  if (options->compression != formats::NativeWriteOptions::Compression::none &&
      !formats::traits_of(format).has_compression) {
    refuse("compress", "none for a format that is not compressed", text);
  }
  return *options;
}

std::optional<DType> parse_cast(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  const auto dtype = parse_dtype(*name);
  if (!dtype) refuse("cast", dtype_expectation(*name), *name);
  return dtype;
}

reshard::OptimizerNames parse_names(const std::string& name) {
  const auto names = reshard::parse_optimizer_names(name);
  if (!names) refuse("optimizer_names", "as-stored, canonical or torchrec", name);
  return *names;
}

MergePreference parse_preference(const std::optional<std::string>& name) {
  if (!name) return MergePreference::none;
  if (*name != "first" && *name != "last") refuse("prefer", "first or last", *name);
  return *name == "first" ? MergePreference::first : MergePreference::last;
}

formats::MergedCheckpoint open(const Sources& sources) {
  const FileSystem& fs = FileSystem::posix();
  const MergePath& first = sources.paths.front();
  if (sources.paths.size() > 1 || !first.prefix.empty()) {
    return formats::open_merged(fs, sources.paths, sources.preference);
  }
  return {formats::open_checkpoint(fs, first.path, {.flat_layout_path = sources.flat_layout_path}),
          {}};
}

/// Returns none where nothing is to be kept.
std::optional<formats::JournalOptions> journal_options(bool resume, bool discard) {
  if (!resume && !discard) return std::nullopt;
  return formats::JournalOptions{.identity = {{"tool", kTool}},
                                 .kept_work = resume ? KeptWork::resume : KeptWork::discard};
}

/// Moves. Returns how many bytes an earlier move had moved.
std::uint64_t execute(const Request& request, const Plan& plan, const CheckpointReader& reader,
                      Watch& watch) {
  FileSystem& fs = FileSystem::posix();
  watch.set_total(plan.nbytes_to_write);
  ExecuteOptions options = request.execute;
  options.stop = watch.token();
  options.progress = watch.sink();
  const auto writer = reshard::start_move(plan, reader, fs, request.destination, request.create);
  return reshard::finish_or_keep(plan, reader, *writer, fs, request.destination, options);
}

/// Plans, and moves unless that is only to be planned.
Outcome run(const Request& request, Watch& watch) {
  FileSystem& fs = FileSystem::posix();
  for (const MergePath& source : request.sources.paths) {
    formats::check_destination(fs, source.path, request.destination, request.create.overwrite,
                               "overwrite=True");
  }
  const auto [reader, collisions] = open(request.sources);
  request.sources.prefixes.check_used(reader->contents(), "prefix");
  Plan plan = reshard::plan_reshard(reader->contents(), reader->path(), request.plan,
                                    reshard::find_gaps(*reader, request.plan.only));
  plan.problems.insert(plan.problems.begin(), collisions.begin(), collisions.end());
  std::uint64_t kept_nbytes = 0;
  std::optional<std::string> left_over;
  if (plan.problems.empty()) {
    if (request.dry_run) {
      reshard::check_move(plan, *reader, fs, request.destination, request.create);
    } else {
      kept_nbytes = execute(request, plan, *reader, watch);
      if (request.create.overwrite == OverwritePolicy::replace) {
        left_over = formats::left_over_at(fs, request.destination);
      }
    }
  }
  std::string digest = reshard::plan_digest(plan, reader->contents());
  return {std::move(plan), reader->format(), kept_nbytes, std::move(digest), std::move(left_over)};
}

nb::dict summary(const Request& request, const Outcome& outcome) {
  const Plan& plan = outcome.plan;
  nb::dict result;
  result["source_format"] = text_to_python(format_name(outcome.source_format));
  result["format"] = text_to_python(format_name(request.create.format));
  result["world_size"] = plan.destination.world_size;
  result["num_tensors"] = plan.destination.tensors.size();
  result["num_values"] = plan.destination.values.size();
  result["num_aliases"] = plan.destination.aliases.size();
  result["nbytes"] = plan.nbytes_to_write;
  result["written"] = plan.problems.empty() && !request.dry_run;
  result["kept_nbytes"] = outcome.kept_nbytes;
  result["plan"] = text_to_python(outcome.plan_digest);
  nb::list ranks;
  for (const reshard::RankShare& share : reshard::rank_shares(plan)) {
    ranks.append(nb::make_tuple(share.num_pieces, share.nbytes));
  }
  result["ranks"] = ranks;
  result["notes"] = findings_to_python(plan.notes);
  result["problems"] = findings_to_python(plan.problems);
  result["left_over"] = outcome.left_over ? text_to_python(*outcome.left_over) : nb::none();
  return result;
}

nb::dict move(const std::vector<std::pair<nb::bytes, nb::bytes>>& sources,
              const nb::bytes& destination, const std::optional<std::string>& prefer,
              const std::vector<nb::bytes>& prefixes, bool keep_prefix,
              const std::optional<std::string>& to, int world_size, const std::string& strategy,
              const nb::bytes& plan_path, const nb::bytes& units_path, const nb::bytes& flat_layout,
              const std::string& compress, const std::vector<nb::bytes>& only,
              const std::vector<std::pair<nb::bytes, nb::bytes>>& rename,
              const std::string& optimizer_names, const std::optional<std::string>& cast,
              std::uint64_t max_shard_nbytes, bool drop_optimizer, bool allow_missing,
              bool allow_lossy, std::uint64_t memory_nbytes, int num_threads, bool dry_run,
              bool overwrite, bool resume, bool discard, const nb::object& progress) {
  Request request{.sources = {.paths = {},
                              .preference = parse_preference(prefer),
                              .flat_layout_path = string_of(flat_layout),
                              .prefixes = NamePrefixes(strings_of(prefixes))},
                  .destination = string_of(destination),
                  .dry_run = dry_run};
  for (const auto& [path, prefix] : sources) {
    request.sources.paths.push_back({string_of(path), string_of(prefix)});
  }
  const Format format = parse_format(to, request.destination);

  request.create.format = format;
  request.create.overwrite = overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse;
  request.create.native = parse_compression(compress, format);
  request.create.journal = journal_options(resume, discard);
  if (max_shard_nbytes != 0) {
    if (!formats::traits_of(format).has_several_files) {
      refuse("max_shard_size",
             "to=" + formats::writable_formats_in_words(
                         [](const formats::FormatTraits& of) { return of.has_several_files; }),
             std::string(format_name(format)));
    }
    request.create.safetensors.max_shard_nbytes = max_shard_nbytes;
  }
  request.execute = {.memory_nbytes = memory_nbytes, .num_threads = num_threads};

  PlanOptions& plan = request.plan;
  plan.format = format;
  plan.world_size = world_size;
  plan.strategy = strategy;
  std::vector<std::string> patterns = strings_of(only);
  append(patterns, request.sources.prefixes.patterns());
  plan.only = NameSelection(patterns);
  GivenOptions given;
  for (const auto& [from, into] : rename) {
    given.renames.push_back({string_of(from), string_of(into)});
  }
  if (!keep_prefix) given.prefix_removals = request.sources.prefixes.removals();
  append(plan.renames, given.renames);
  append(plan.renames, given.prefix_removals);
  plan.optimizer_names = parse_names(optimizer_names);
  plan.cast = parse_cast(cast);
  if (drop_optimizer) plan.optimizer = reshard::OptimizerPart::leave_out;
  if (allow_missing) plan.missing = Relaxation::allow;
  if (allow_lossy) plan.lossy = Relaxation::allow;
  if (const std::string path = string_of(plan_path); !path.empty()) {
    given.table_plan = read_option_file(path);
    plan.table_plan = TablePlan::from_json(given.table_plan, path);
  }
  if (const std::string path = string_of(units_path); !path.empty()) {
    given.units = read_option_file(path);
    plan.units = flat_units_from_json(given.units, path);
  }
  if (const std::string& path = request.sources.flat_layout_path; !path.empty()) {
    given.flat_layout = read_option_file(path);
  }

  if (auto& journal = request.create.journal) {
    const auto& paths = request.sources.paths;
    for (const auto& source : paths) {
      if (paths.size() > 1) given.source_prefixes.push_back(source.prefix);
    }
    given.preference = request.sources.preference;
    given.world_size = world_size;
    given.strategy = strategy;
    given.only = std::move(patterns);
    given.cast = plan.cast;
    given.optimizer_names = plan.optimizer_names;
    given.drop_optimizer = drop_optimizer;
    given.allow_missing = allow_missing;
    given.allow_lossy = allow_lossy;
    journal->identity.merge(reshard::explain_plan(given));
  }

  Outcome outcome;
  run_watched(progress, [&](Watch& watch) { outcome = run(request, watch); });
  return summary(request, outcome);
}

}  // namespace

void bind_move(nb::module_& module) {
  module.def("move", &move, nb::arg("sources"), nb::arg("destination"), nb::kw_only(),
             nb::arg("prefer").none(), nb::arg("prefixes"), nb::arg("keep_prefix"),
             nb::arg("to").none(), nb::arg("world_size"), nb::arg("strategy"), nb::arg("plan"),
             nb::arg("units"), nb::arg("flat_layout"), nb::arg("compress"), nb::arg("only"),
             nb::arg("rename"), nb::arg("optimizer_names"), nb::arg("cast").none(),
             nb::arg("max_shard_size"), nb::arg("drop_optimizer"), nb::arg("allow_missing"),
             nb::arg("allow_lossy"), nb::arg("memory"), nb::arg("threads"), nb::arg("dry_run"),
             nb::arg("overwrite"), nb::arg("resume"), nb::arg("discard"),
             nb::arg("progress").none());
}

}  // namespace tessera::python
