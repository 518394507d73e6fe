#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/formats/create.h"
#include "tessera/formats/merge.h"
#include "tessera/recipe/recipe.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/optimizer_params.h"
#include "tessera/reshard/planner.h"

// The options of a move as Python gives them, and as the core takes them. Needs no Python.
namespace tessera::python {

/// The options of a move, as `_MoveOptions` in `_core.pyi` has them.
struct MoveOptions {
  std::optional<std::string> prefer;  // of a merge: "first" or "last"
  std::vector<std::string> prefixes;  // of a split
  bool keep_prefix = false;           // of a split

  std::optional<std::string> to;  // none: by the suffix of the destination
  int world_size = 0;             // 0: not given
  std::optional<std::string> strategy;
  std::string plan_path;         // empty: not given
  std::string mesh_path;         // empty: not given
  std::string like_path;         // of a checkpoint; empty: not given
  std::string units_path;        // empty: not given
  std::string flat_layout_path;  // empty: not given
  std::vector<std::string> as_dict;
  std::string compress;
  std::string base;  // empty: not given
  std::vector<std::string> only;
  std::vector<reshard::Rename> renames;
  bool drop_optimizer = false;
  std::string optimizer_params;       // a file or "auto"; empty: not given
  std::string recipe_path;            // empty: not given
  bool inverse = false;               // of the recipe
  std::vector<std::string> settings;  // of the recipe: NAME=VALUE
  std::string optimizer_names;
  std::optional<std::string> cast;
  std::string on_overflow;
  std::uint64_t max_shard_nbytes = 0;  // 0: not given
  std::string device_mesh;             // empty: not given
  bool allow_missing = false;
  bool allow_lossy = false;
  bool as_is = false;
  std::string extra_files;
  std::string extra_files_folder;  // empty: not given
  std::uint64_t extra_files_nbytes = 0;
  std::uint64_t memory_nbytes = 0;
  int num_threads = 0;                  // 0: object_store::default_num_threads()
  std::string spool;                    // a folder; empty: that of the system
  std::optional<std::string> endpoint;  // of s3:// paths; none: not given
  bool dry_run = false;
  bool overwrite = false;
  bool resume = false;
  bool discard = false;
  std::optional<std::pair<int, int>> part;  // of several workers: its number, and how many
  bool take_over = false;
};

/// A recipe to apply to a checkpoint.
struct RecipeRequest {
  recipe::Recipe recipe;
  recipe::RecipeOptions options;
};

/// Reads the recipe at `path`, and config.json beside the checkpoint; nothing if `path` is empty.
/// Throws: Error(invalid_argument) if the other arguments need a recipe.
std::optional<RecipeRequest> read_recipe(const std::string& path, bool inverse,
                                         const std::vector<std::string>& settings,
                                         const std::string& checkpoint);

/// The checkpoints to move: one, or several to merge.
struct Sources {
  std::vector<formats::MergePath> paths;
  formats::MergePreference preference = formats::MergePreference::none;
  std::string flat_layout_path;      // for one checkpoint only
  std::vector<std::string> as_dict;  // classes whose objects are read as dicts
  reshard::NamePrefixes prefixes{};  // names must exist under each of them
  /// Names for the numbers of an optimizer's parameters; none: numbers stay.
  std::optional<reshard::OptimizerParams> optimizer_params{};
  std::optional<RecipeRequest> recipe{};
  /// A checkpoint whose pieces the destination gets; null: not given.
  std::shared_ptr<const formats::CheckpointContents> like{};
};

/// A move in the core's terms.
struct MoveRequest {
  Sources sources;
  std::string destination;
  std::string base{};   // of the checkpoint to share files with; empty: not given
  std::string spool{};  // a folder, for a destination on an object store
  bool dry_run = false;
  reshard::PlanOptions plan{};
  formats::CreateOptions create{};
  reshard::ExtraFilesOptions extra_files{};
  reshard::ExecuteOptions execute{};
  std::optional<reshard::SharedMoveOptions> worker{};  // if several workers do the move
};

/// Reads the files that `options` name, and returns the move that they describe. Throws:
/// Error(invalid_argument) if an option has no meaning or does not fit the destination's format,
/// what reading a file throws.
MoveRequest make_move_request(std::vector<formats::MergePath> sources, std::string destination,
                              const MoveOptions& options);

/// Returns the format of that name; nothing: as the destination's name suggests. Throws:
/// Error(invalid_argument) listing the formats that can be written.
formats::Format format_to_write(const std::optional<std::string>& name,
                                const std::string& destination);

/// Returns what `compress` means for that format. Throws: Error(invalid_argument).
formats::NativeWriteOptions compression_to_write(const std::string& text, formats::Format format);

}  // namespace tessera::python
