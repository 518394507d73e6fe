#include "ckpt-reshard/move_options.h"

#include <utility>

#include "ckpt-reshard/dequantize_option.h"
#include "cli/format_rows.h"
#include "object_store/files.h"
#include "reshard/journaled_options.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/native.h"

namespace tessera::cli {
namespace {

using formats::FormatTraits;
using formats::NativeWriteOptions;
using reshard::PlanOptions;

constexpr std::uint64_t kMaxOptionFileNbytes = std::uint64_t{256} << 20;

[[noreturn]] void refuse_option(const std::string& option, const std::string& expected,
                                const std::string& found) {
  throw UsageError(option + ": expected " + expected + ", found '" + printable(found) + "'",
                   "ckpt-reshard --help");
}

std::string read_option_file(const std::string& path) {
  return path.empty() ? path : read_file(FileSystem::posix(), path, kMaxOptionFileNbytes);
}

NativeWriteOptions compression(const MoveOptions& options) {
  const auto parsed = formats::parse_compression(options.compress);
  if (!parsed) refuse_option("--compress", std::string(formats::kCompressions), options.compress);
  return *parsed;
}

std::vector<reshard::Rename> parse_renames(const std::vector<std::string>& texts) {
  std::vector<reshard::Rename> renames;
  for (const std::string& text : texts) {
    const std::optional<reshard::Rename> rename = parse_rename(text);
    if (!rename) refuse_option("--rename", "FROM=TO", text);
    renames.push_back(*rename);
  }
  return renames;
}

/// Returns the world size that was given; 0 if none was. Throws if it is below 1.
int given_world_size(const MoveOptions& options) {
  if (options.world_size == MoveOptions::kNotGiven) return 0;
  if (options.world_size < 1) {
    refuse_option("--world-size", "a number of 1 or more", std::to_string(options.world_size));
  }
  return options.world_size;
}

/// Adds the options that say how a move runs. They do not change what it writes.
void add_run_options(Command& command, MoveOptions& options) {
  command.size_option("--memory", "SIZE", options.memory_nbytes,
                      "Memory for all buffers (default: {})");
  add_threads_option(command, options.num_threads);
  command
      .option("--spool", "DIR", options.spool,
              "Folder for the files of DST before they are uploaded, if DST is s3://… (default: "
              "TMPDIR, or /tmp)")
      .flag("--dry-run", options.dry_run, "Print how many bytes each rank would get; write nothing")
      .flag("--overwrite", options.overwrite, "Replace DST once the new checkpoint is complete")
      .flag("--resume", options.resume, "Resume the work of an interrupted run, if there is any")
      .flag("--discard", options.discard,
            "Remove the work of an interrupted run, and start from the beginning")
      .flag("--quiet", options.quiet, "Print only errors and warnings")
      .flag("--json", options.json, "Print the summary as JSON");
  add_progress_option(command, options.progress);
  add_worker_options(command, options.worker);
}

}  // namespace

void add_flat_layout_option(Command& command, MoveOptions& options) {
  command.option("--flat-layout", "FILE", options.flat_layout_path,
                 "JSON file: the parameters in the flat vectors of SRC (FSDP1 LOCAL_STATE_DICT)");
}

void add_base_option(Command& command, MoveOptions& options) {
  command.option("--base", "PREVIOUS", options.base,
                 "Write only what differs from the older checkpoint PREVIOUS. For the rest, DST "
                 "gets hard links to its files. You may remove PREVIOUS later. Native format only");
  command.flag("--changed-rows", options.changed_rows,
               "With --base: if only some rows of a table differ, write these rows alone");
}

void add_move_options(Command& command, MoveOptions& options) {
  command
      .choice(
          "--to", formats::writable_format_names(),
          [&](const std::string& name) { options.format = *formats::parse_format(name); },
          "Format of DST (default: " + default_format_rule() + ")")
      .option("--world-size", "N", options.world_size, "Number of ranks to write for")
      .option("--strategy", "NAME", options.strategy,
              "How tensors are cut: replicated, flat (FSDP1), dim0 (FSDP2), dim1, hybrid:AxB or "
              "hybrid-flat:AxB (A replicas of B ranks)")
      .option("--mesh", "FILE", options.mesh_path,
              "JSON file: a mesh of ranks, and for each pattern of names the dimension that each "
              "axis of the mesh cuts (such as FSDP with tensor parallelism)")
      .option("--like", "OTHER", options.like_path,
              "Cut each tensor as the checkpoint OTHER cuts the tensor of the same name")
      .option("--plan", "FILE", options.table_plan_path,
              "JSON file: the plan of the embedding tables, as ckpt-inspect plan writes it")
      .option("--units", "FILE", options.units_path,
              "JSON file: the flat units (the parameters of each flat parameter) for --strategy "
              "flat or hybrid-flat (default: those that SRC records)")
      .option("--as-dict", "CLASS", options.as_dict,
              "Read objects of this class, such as argparse.Namespace, as dicts. Repeatable")
      .option("--compress", "HOW", options.compress,
              "Compression: none, zstd or zstd:LEVEL (default: {}). Native format only")
      .option("--only", "GLOB", options.only,
              "Move only names that match GLOB, and all names below them. =GLOB: only the names "
              "themselves. !GLOB: leave these names out. Repeatable")
      .option("--rename", "FROM=TO", options.renames,
              "Replace FROM at the start of names by TO; =TO puts TO before every name. Repeatable")
      .flag("--drop-optimizer", options.drop_optimizer,
            "Leave out optimizer state and param_groups")
      .option("--optimizer-params", "FILE", options.optimizer_params,
              "Name the state that an optimizer keeps under numbers: a JSON file with the "
              "parameters' names in the optimizer's order, or auto, which finds them in SRC. The "
              "opposite, for a plain optimizer: numbers")
      .choice(
          "--optimizer-names", {"as-stored", "canonical", "torchrec"},
          [&](const std::string& name) {
            options.optimizer_names = *reshard::parse_optimizer_names(name);
          },
          "Names and shapes for the fused optimizer state of embedding tables (default: as-stored)")
      .option("--dequantize", "DTYPE", options.dequantize,
              "Turn quantized weights into numbers of DTYPE, such as bfloat16")
      .option("--cast", "DTYPE", options.cast,
              "Convert floating-point tensors to DTYPE: parameters, buffers, and optimizer state "
              "with one number per element or per row of its parameter. Tensors without dimensions "
              "and state of the trainer keep their dtype")
      .choice(
          "--on-overflow", {"refuse", "saturate", "infinity"},
          [&](const std::string& name) { options.on_overflow = *reshard::parse_on_overflow(name); },
          "What --cast does with numbers that are too large for DTYPE: fail, take its largest "
          "number, or make them infinite (default: refuse)")
      .size_option("--max-shard-size", "SIZE", options.max_shard_nbytes,
                   "Largest size of one file, such as 5GB; a larger tensor gets a file of its own. "
                   "Safetensors format only")
      .option(
          "--device-mesh", "TYPE:NAMES", options.device_mesh,
          "Device type and axis names of the trainer's mesh, to write into each rank's file, such "
          "as cuda:ddp,fsdp or cpu (default: cuda:fsdp). Format rank_files only")
      .flag("--allow-missing", options.allow_missing,
            "Leave out tensors and values that are incomplete or missing in SRC")
      .flag("--allow-lossy", options.allow_lossy,
            "Allow merging row-wise optimizer state (one number per row) of several column shards "
            "by a weighted mean, which loses the shards' own numbers")
      .flag("--as-is", options.as_is,
            "Move one part of a checkpoint, such as the file of one rank, as if it were whole")
      .choice(
          "--extra-files", {"carry", "leave", "refuse"},
          [&](const std::string& policy) {
            options.extra_files = *reshard::parse_extra_files_policy(policy);
          },
          "What to do with other files in the folder of SRC, such as config.json: copy them into "
          "DST (default), leave them, or stop")
      .option("--extra-files-from", "DIR", options.extra_files_folder,
              "Copy the other files of DIR instead of those of SRC")
      .size_option("--extra-files-limit", "SIZE", options.extra_files_nbytes,
                   "Copy at most SIZE of these files in total; the largest files are left out "
                   "(default: {})");
  add_recipe_options(command, options.recipe);
  add_run_options(command, options);
}

void check_options(const MoveOptions& options) {
  if (options.changed_rows && options.base.empty()) {
    throw UsageError("--changed-rows: expected --base PREVIOUS too, found no --base",
                     "ckpt-reshard --help");
  }
  if (options.resume && options.discard)
    throw UsageError("--resume: expected either --resume or --discard, found both",
                     "ckpt-reshard --help");
  if (!options.extra_files_folder.empty() &&
      options.extra_files != reshard::ExtraFilesPolicy::carry) {
    const bool leaves = options.extra_files == reshard::ExtraFilesPolicy::leave;
    refuse_option("--extra-files-from", "--extra-files carry", leaves ? "leave" : "refuse");
  }
  const std::string found = "--to " + std::string(options.format->name());
  const FormatTraits traits = formats::traits_of(*options.format);
  if (compresses(options) && !traits.has_compression) {
    refuse_option("--compress",
                  "--to " + formats::writable_formats_in_words(
                                [](const FormatTraits& of) { return of.has_compression; }),
                  found);
  }
  if (!options.base.empty() && !traits.has_base) {
    refuse_option("--base",
                  "--to " + formats::writable_formats_in_words(
                                [](const FormatTraits& of) { return of.has_base; }),
                  found);
  }
  if (options.max_shard_nbytes != 0 && !traits.has_several_files) {
    refuse_option("--max-shard-size",
                  "--to " + formats::writable_formats_in_words(
                                [](const FormatTraits& of) { return of.has_several_files; }),
                  found);
  }
  if (!options.device_mesh.empty() && !traits.has_device_mesh) {
    refuse_option("--device-mesh",
                  "--to " + formats::writable_formats_in_words(
                                [](const FormatTraits& of) { return of.has_device_mesh; }),
                  found);
  }
}

OptionFiles::OptionFiles(const MoveOptions& options, const std::vector<std::string>& sources)
    : table_plan(read_option_file(options.table_plan_path)),
      mesh(read_option_file(options.mesh_path)),
      units(read_option_file(options.units_path)),
      flat_layout(read_option_file(options.flat_layout_path)),
      recipe(read_recipe(options.recipe, sources, options.extra_files_folder)),
      quantization(dequantize_identity(object_store::files(), sources, options)) {
  if (!options.like_path.empty()) {
    like = std::make_shared<const formats::CheckpointContents>(
        formats::open_checkpoint(object_store::files(), options.like_path)->contents());
  }
  if (options.optimizer_params.empty()) return;
  optimizer_params = reshard::read_optimizer_params(FileSystem::posix(), options.optimizer_params);
}

reshard::PlanOptions plan_options(const MoveOptions& options, const OptionFiles& files) {
  PlanOptions plan;
  plan.format = *options.format;
  plan.world_size = given_world_size(options);
  plan.strategy = options.strategy;
  plan.only = NameSelection(options.only);
  if (options.drop_optimizer) plan.optimizer = reshard::OptimizerSelection::leave_out;
  plan.optimizer_names = options.optimizer_names;
  plan.renames = parse_renames(options.renames);
  plan.renames.insert(plan.renames.end(), options.prefix_removals.begin(),
                      options.prefix_removals.end());
  if (!options.cast.empty()) {
    plan.cast = parse_dtype(options.cast);
    if (!plan.cast) refuse_option("--cast", dtype_expectation(options.cast), options.cast);
    if (is_complex(*plan.cast)) refuse_option("--cast", "a dtype of real numbers", options.cast);
  }
  plan.on_overflow = options.on_overflow;
  if (options.allow_missing) plan.missing = reshard::Relaxation::allow;
  if (options.allow_lossy) plan.lossy = reshard::Relaxation::allow;
  if (options.as_is) plan.part = reshard::Relaxation::allow;
  if (!options.table_plan_path.empty()) {
    plan.table_plan = TablePlan::from_json(files.table_plan, options.table_plan_path);
  }
  if (!options.mesh_path.empty()) {
    plan.mesh = MeshLayout::from_json(files.mesh, options.mesh_path);
  }
  plan.like = files.like;
  plan.like_path = options.like_path;
  if (!options.units_path.empty()) {
    plan.units = flat_units_from_json(files.units, options.units_path);
  }
  return plan;
}

OverwritePolicy overwrite_policy(const MoveOptions& options) {
  return options.overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse;
}

bool keeps_names(const MoveOptions& options) {
  return options.recipe.path.empty() && options.extra_files_folder.empty();
}

formats::CreateOptions create_options(const MoveOptions& options, const OptionFiles& files,
                                      const reshard::PlanOptions& plan) {
  formats::CreateOptions create;
  create.format = *options.format;
  create.overwrite = overwrite_policy(options);
  create.keeps_names = keeps_names(options);
  create.native = compression(options);
  create.journal.emplace();
  const std::string like_digest = files.like ? reshard::layout_digest(*files.like) : "";
  const std::string recipe = recipe_identity(files.recipe);
  create.journal->identity =
      reshard::identity_of_options({.world_size = plan.world_size,
                                    .strategy = plan.strategy,
                                    .table_plan = files.table_plan,
                                    .mesh = files.mesh,
                                    .like = like_digest,
                                    .units = files.units,
                                    .flat_layout = files.flat_layout,
                                    .as_dict = options.as_dict,
                                    .optimizer_params = files.optimizer_params.names,
                                    .recipe = recipe,
                                    .inverse = options.recipe.inverse,
                                    .set = options.recipe.settings,
                                    .only = options.only,
                                    .renames = parse_renames(options.renames),
                                    .prefix_removals = options.prefix_removals,
                                    .source_prefixes = options.source_prefixes,
                                    .preference = options.preference,
                                    .cast = plan.cast,
                                    .on_overflow = options.on_overflow,
                                    .optimizer_names = options.optimizer_names,
                                    .drop_optimizer = options.drop_optimizer,
                                    .allow_missing = options.allow_missing,
                                    .allow_lossy = options.allow_lossy,
                                    .as_is = options.as_is});
  if (!options.combination.empty()) {
    create.journal->identity["combination"] = options.combination;
  }
  if (!options.dequantize.empty()) {
    create.journal->identity["dequantize"] = options.dequantize;
    create.journal->identity["config.json"] = files.quantization;
  }
  if (!options.combination.empty() || !options.dequantize.empty()) {  // these round as a cast does
    create.journal->identity["on-overflow"] = reshard::on_overflow_name(options.on_overflow);
  }
  create.journal->identity["tool"] = "ckpt-reshard " TESSERA_VERSION;
  if (options.resume) create.journal->kept_work = formats::KeptWork::resume;
  if (options.discard) create.journal->kept_work = formats::KeptWork::discard;
  if (!options.device_mesh.empty()) {
    create.device_mesh = formats::DeviceMeshOptions::parse(options.device_mesh);
  }
  if (options.max_shard_nbytes != 0) create.safetensors.max_shard_nbytes = options.max_shard_nbytes;
  return create;
}

bool compresses(const MoveOptions& options) {
  return compression(options).compression != NativeWriteOptions::Compression::none;
}

}  // namespace tessera::cli
