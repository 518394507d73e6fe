#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reshard/optimizer_params.h"
#include "tessera/formats/create.h"
#include "tessera/formats/merge.h"
#include "tessera/recipe/recipe.h"
#include "tessera/reshard/base_comparison.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

// Converts the options of a move from Python's form to the core's. Uses no Python.
namespace tessera::python {

/// The options of a move, as `_MoveOptions` in `_core.pyi` has them.
struct MoveOptions {
  std::optional<std::string> prefer;  // only of a merge: "first" or "last"
  std::vector<std::string> prefixes;  // only of a split
  bool keep_prefix = false;           // only of a split

  std::optional<std::string> to;  // none: chosen by the suffix of the destination
  int world_size = 0;             // 0: not given
  std::optional<std::string> strategy;
  std::string plan_path;         // empty: not given
  std::string mesh_path;         // empty: not given
  std::string like_path;         // path of a checkpoint; empty: not given
  std::string units_path;        // empty: not given
  std::string flat_layout_path;  // empty: not given
  std::vector<std::string> as_dict;
  std::string compress;  // "none", "zstd" or "zstd:LEVEL"
  std::string base;      // empty: not given
  bool changed_rows = false;
  std::vector<std::string> only;
  std::vector<reshard::Rename> renames;
  bool drop_optimizer = false;
  std::string optimizer_params;        // a file, "auto" or "numbers"; empty: not given
  std::string recipe_path;             // empty: not given
  bool inverse = false;                // apply the recipe backwards
  std::vector<std::string> settings;   // variables of the recipe: NAME=VALUE
  std::string optimizer_names;         // "as-stored", "canonical" or "torchrec"
  std::optional<std::string> cast;     // a dtype
  std::string on_overflow;             // "refuse", "saturate" or "infinity"
  std::uint64_t max_shard_nbytes = 0;  // 0: not given
  std::string device_mesh;             // empty: not given
  bool allow_missing = false;          // leave out incomplete tensors and values
  bool allow_lossy = false;            // merge row-wise state by a weighted mean
  bool as_is = false;                  // write a part of a checkpoint as if it were whole
  std::string extra_files;             // "carry", "leave" or "refuse"
  std::string extra_files_folder;      // empty: not given
  std::uint64_t extra_files_nbytes = 0;
  std::uint64_t memory_nbytes = 0;
  int num_threads = 0;                  // 0: object_store::default_num_threads()
  std::string spool;                    // a folder; empty: TMPDIR or /tmp
  std::optional<std::string> endpoint;  // of s3:// paths; none: not given
  bool dry_run = false;
  bool overwrite = false;
  bool resume = false;
  bool discard = false;
  // I and N: the worker writes share I of N; none: one process does the move.
  std::optional<std::pair<int, int>> part;
  bool take_over = false;
};

/// A recipe to apply to a checkpoint.
struct RecipeRequest {
  recipe::Recipe recipe;
  recipe::RecipeOptions options;
};

/// Reads the recipe at `path`, and the model's config.json: beside the first of `checkpoints` (the
/// sources), else in `model_folder` (empty: none). Returns nullopt if `path` is empty. Throws:
/// Error(invalid_argument) if `path` is empty but `inverse` or `settings` is given.
std::optional<RecipeRequest> read_recipe(const std::string& path, bool inverse,
                                         const std::vector<std::string>& settings,
                                         const std::vector<std::string>& checkpoints,
                                         const std::string& model_folder = {});

/// The checkpoints to move: one, or several to merge.
struct Sources {
  std::vector<formats::MergePath> paths;
  formats::MergePreference preference = formats::MergePreference::none;
  std::string flat_layout_path;      // only if there is one checkpoint
  std::vector<std::string> as_dict;  // classes whose objects are read as dicts
  reshard::NamePrefixes prefixes{};  // each prefix must have names
  /// Names for the numbers of an optimizer's parameters; none: numbers stay.
  std::optional<reshard::OptimizerParams> optimizer_params{};
  std::optional<RecipeRequest> recipe{};
  /// A checkpoint: the destination's tensors are cut as its tensors are; null: not given.
  std::shared_ptr<const formats::CheckpointContents> like{};
};

/// A move in the core's terms.
struct MoveRequest {
  Sources sources;
  std::string destination;
  std::string base{};  // path of the checkpoint to share files with; empty: not given
  reshard::RowChanges row_changes = reshard::RowChanges::write_piece;
  std::string spool{};  // a folder, for a destination on an object store
  bool dry_run = false;
  reshard::PlanOptions plan{};
  formats::CreateOptions create{};
  reshard::ExtraFilesOptions extra_files{};
  reshard::ExecuteOptions execute{};
  std::optional<reshard::SharedMoveOptions> worker{};  // none: one process does the move
};

/// Reads the files that `options` name, and returns the move that they describe. Throws:
/// Error(invalid_argument) if an option is invalid or does not fit the destination's format; what
/// reading a file throws.
MoveRequest make_move_request(std::vector<formats::MergePath> sources, std::string destination,
                              const MoveOptions& options);

/// Returns the format with this name; without a name, the format that the destination's suffix
/// means. Throws: Error(invalid_argument) with a list of the formats that can be written.
formats::Format format_to_write(const std::optional<std::string>& name,
                                const std::string& destination);

/// Returns the compression that the option `compress` means for this format. Throws:
/// Error(invalid_argument) if `text` is not known, or if the format has no compression.
formats::NativeWriteOptions compression_to_write(const std::string& text, formats::Format format);

}  // namespace tessera::python
