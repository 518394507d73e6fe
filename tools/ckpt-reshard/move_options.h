#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ckpt-reshard/worker_options.h"
#include "cli/command_line.h"
#include "cli/progress.h"
#include "cli/recipe_option.h"
#include "cli/threads_option.h"
#include "reshard/optimizer_params.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/create.h"
#include "tessera/formats/merge.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

namespace tessera::cli {

/// The options that all verbs that write a checkpoint share.
struct MoveOptions {
  static constexpr int kNotGiven = std::numeric_limits<int>::min();

  std::string destination;
  std::optional<formats::Format> format;  // none: by the suffix of the destination
  int world_size = kNotGiven;
  std::string strategy;
  std::string table_plan_path;
  std::string mesh_path;
  std::string like_path;  // a checkpoint; DST's tensors are cut as in it; empty: not given
  std::string units_path;
  std::string flat_layout_path;      // for the source; only verbs that read one checkpoint
  std::vector<std::string> as_dict;  // classes whose objects are read as dicts
  std::string compress = "none";
  std::string base;  // path of the checkpoint to share files with; empty: not given
  bool changed_rows = false;
  std::vector<std::string> only;
  std::string only_option = "--only";  // the option that set `only`, for messages
  std::vector<std::string> renames;
  std::vector<reshard::Rename> prefix_removals;  // applied to names that no rename matches
  std::vector<std::string> source_prefixes;      // only of a merge
  formats::MergePreference preference = formats::MergePreference::none;  // of merge and combine
  std::string combination;       // of `combine`: the formula; empty: none
  bool drop_optimizer = false;   // leave out optimizer state and groups
  std::string optimizer_params;  // a file, `auto` or `numbers`; empty: not given
  RecipeArguments recipe;
  reshard::OptimizerNames optimizer_names = reshard::OptimizerNames::as_stored;
  std::string dequantize;  // a dtype; empty: not given
  std::string cast;        // a dtype; empty: not given
  reshard::OnOverflow on_overflow = reshard::OnOverflow::refuse;
  bool allow_missing = false;  // leave out incomplete tensors and values
  bool allow_lossy = false;    // merge row-wise state by a weighted mean
  bool as_is = false;          // write a part of a checkpoint as if it were whole
  std::uint64_t memory_nbytes = kDefaultMemoryNbytes;
  std::uint64_t max_shard_nbytes = 0;  // 0: not given
  std::string device_mesh;             // empty: not given
  int num_threads = kDefaultThreads;
  reshard::ExtraFilesPolicy extra_files = reshard::ExtraFilesPolicy::carry;
  std::string extra_files_folder;  // empty: not given
  std::uint64_t extra_files_nbytes = reshard::kDefaultExtraFilesNbytes;
  std::string spool;  // a folder; empty: TMPDIR or /tmp
  bool dry_run = false;
  bool overwrite = false;
  bool resume = false;   // continue the work of an interrupted run
  bool discard = false;  // remove the work of an interrupted run
  WorkerOptions worker;
  bool quiet = false;
  bool json = false;
  ProgressOptions progress{};
};

void add_move_options(Command& command, MoveOptions& options);
/// Adds `--base PREVIOUS` and `--changed-rows`. Not for `combine`, whose `--base` means something
/// else.
void add_base_option(Command& command, MoveOptions& options);
/// Adds `--flat-layout`, for verbs that read one checkpoint.
void add_flat_layout_option(Command& command, MoveOptions& options);

/// Refuses options that contradict each other, or that the destination's format does not support.
/// Requires: `options.format` is set. Throws: UsageError.
void check_options(const MoveOptions& options);

/// The contents of the files that options name, and of the checkpoint of `--like`. Empty for
/// options that are not given.
struct OptionFiles {
  /// `sources`: paths of the checkpoints. A recipe and `--dequantize` need the first one's
  /// config.json, a recipe also the arguments of Megatron's in all of them.
  OptionFiles(const MoveOptions& options, const std::vector<std::string>& sources);

  std::string table_plan;
  std::string mesh;
  std::shared_ptr<const formats::CheckpointContents> like;  // null: not given
  std::string units;
  std::string flat_layout;
  reshard::OptimizerParams optimizer_params;
  std::optional<RecipeWithOptions> recipe;  // with the source's config.json
  std::string quantization;                 // dequantize_identity
};

// The next two functions convert the options for the core. Throws: UsageError that names the
// option; Error if the file of --plan, --mesh or --units is wrong.
reshard::PlanOptions plan_options(const MoveOptions& options, const OptionFiles& files);
formats::CreateOptions create_options(const MoveOptions& options, const OptionFiles& files,
                                      const reshard::PlanOptions& plan);
OverwritePolicy overwrite_policy(const MoveOptions& options);
bool keeps_names(const MoveOptions& options);  // CreateOptions::keeps_names
bool compresses(const MoveOptions& options);

}  // namespace tessera::cli
