#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/create.h"
#include "tessera/formats/native.h"
#include "tessera/reshard/planner.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/state/stateful.h"

namespace tessera {

/// How to load a `per_rank` value if the world size has changed. (If not, each rank gets its own.)
enum class PerRank {
  refuse,     // throw an error that names the value
  replicate,  // rank r gets the saved value of rank r % N, where N ranks saved
  merge,      // each rank gets the list of all saved values
  split,      // lists: join them, divide the items equally; other values: see Stateful::branch
  drop,       // keep the present value
};

/// How to save a checkpoint. Must be equal on all ranks, except memory and file system.
struct SaveOptions {
  /// All ranks write native and DCP checkpoints together. For other formats all ranks first write a
  /// native checkpoint beside the destination, then rank 0 copies it into the file. The disk then
  /// needs room for both, and the other ranks wait for rank 0.
  formats::Format format{};
  /// What to do if the path has a checkpoint, damaged or not. `refuse` throws. `replace` puts the
  /// new one in its place: on a file system in one step; in an object store the old index is
  /// removed first, so an interrupted save can leave no checkpoint. If the path has files that are
  /// not a checkpoint, both policies throw.
  OverwritePolicy overwrite = OverwritePolicy::refuse;
  formats::NativeWriteOptions native{};  // for native only
  /// If true, saves a parameter group's fields for each parameter: see `flatten_optim_state_dict`.
  bool flatten_optimizer_state_dict = false;
  /// If true, `save` copies the state, returns, and writes in the background. The next `save` or
  /// `wait` throws the error of that write; a `save` that throws it saves nothing.
  bool async = false;
  /// How many checkpoints to keep, this one included: the newest of the checkpoints in its
  /// directory whose names differ only in the last number (`step-900`, `step-1000`). Older ones are
  /// removed when this one is complete. 0: keep all.
  int keep_last = 0;
  /// Path of an older native checkpoint, on the same file system; empty: none. A piece (a stored
  /// region of a tensor) whose bytes are those of this base is not written again: the new
  /// checkpoint gets a hard link to the base's file that holds the piece, and stays complete if the
  /// base is removed. The ranks read the base to compare it. For native only.
  std::string base{};
  /// With a base: if only some rows of a piece differ from it, writes these rows alone. Other
  /// programs that read HDF5 then do not see this tensor as one dataset.
  bool changed_rows = false;
  /// Memory for this rank's buffers. Units: bytes.
  std::uint64_t memory_nbytes = std::uint64_t{64} << 20;
  /// How long rank 0 waits for each other rank, in this save and in later saves and loads. Empty:
  /// keeps the earlier time-out, which at first is that of the mesh.
  std::optional<std::chrono::milliseconds> timeout{};
  /// Writes this rank's files. Must outlive the save. Locks always use the operating system.
  FileSystem* file_system = &FileSystem::posix();
};

/// What a save did on this rank.
struct SaveReport {
  std::uint64_t nbytes_written = 0;    // of tensors, by this rank; with `async`, linked ones too
  std::uint64_t nbytes_linked = 0;     // of tensors that stay in files of the base; 0 with `async`
  bool has_planned = true;             // false: used the plan of the previous save again
  std::chrono::nanoseconds stalled{};  // how long `save` blocked training
};

/// Which differences a load accepts; by default none.
struct LoadOptions {
  bool allow_missing = false;     // state that the checkpoint lacks stays unchanged
  bool allow_unexpected = false;  // entries that the trainer lacks are ignored
  bool allow_cast = false;        // casts between floating dtypes, also for optimizer state
  bool allow_lossy = false;       // merges row-wise state of column shards, by a weighted mean
  /// Patterns (globs) of the names to load, such as `model.*`; the rest stays unchanged. A value,
  /// the state of one parameter and the optimizer's groups are each loaded whole or not at all: a
  /// glob that matches only some of their names is an error.
  std::vector<std::string> only{};
  /// Replaces prefixes of the checkpoint's names. If several renames fit a name, uses the first.
  /// Renaming a parameter (`{"model.fc.", "model.up."}`) also renames its optimizer state and its
  /// name in the optimizer's groups.
  std::vector<reshard::Rename> renames{};
  std::uint64_t memory_nbytes = std::uint64_t{64} << 20;  // of this rank's buffers; bytes
  const FileSystem* file_system = &FileSystem::posix();   // reads this rank's files
};

/// What a load found and loaded.
struct LoadSummary {
  std::string path;
  formats::Format format{};
  int saved_world_size = 1;
  std::uint64_t nbytes_loaded = 0;      // of tensors, to this rank
  std::vector<formats::Finding> notes;  // accepted differences, skipped checkpoints
};

/// Returns one line about what was loaded, and one line for each note, without a final line feed.
std::string summary_to_string(const LoadSummary& summary);

/// A trainer's state, to save and load as one: a model, an optimizer and named values. Shares the
/// model; the optimizer and the values must outlive the TrainState. Keys are those of PyTorch's
/// distributed checkpoint of `{"model": …, "optim": …, <name>: …}`. Not thread-safe.
///
/// Keeps the plan, the buffers and a connection between the ranks from one save to the next. The
/// trainer's collectives do not use this connection, so background saves do not disturb them. The
/// constructor is collective: all ranks of the model's mesh construct their TrainStates in the same
/// order. It throws as `optim_state_dict` for an unsupported optimizer or a parameter in it twice.
/// The destructor waits for a running save, and warns (TORCH_WARN) of an error not thrown yet.
class TrainState {
 public:
  explicit TrainState(std::shared_ptr<torch::nn::Module> model);
  TrainState(std::shared_ptr<torch::nn::Module> model, torch::optim::Optimizer& optimizer);
  template <class Impl>
  explicit TrainState(const torch::nn::ModuleHolder<Impl>& model)
      : TrainState(std::shared_ptr<torch::nn::Module>(model.ptr())) {}
  template <class Impl>
  TrainState(const torch::nn::ModuleHolder<Impl>& model, torch::optim::Optimizer& optimizer)
      : TrainState(std::shared_ptr<torch::nn::Module>(model.ptr()), optimizer) {}
  TrainState(TrainState&&) noexcept;
  TrainState& operator=(TrainState&&) noexcept;
  ~TrainState();

  /// Adds a value that is equal on all ranks; a save writes rank 0's. `object`: see `stateful`.
  /// Throws: Error(invalid_argument) if the name is taken, empty, a number, or has a dot.
  template <class T>
  TrainState& with(std::string name, T& object) & {
    add(std::move(name), stateful(object));
    return *this;
  }
  template <class T>
  TrainState&& with(std::string name, T& object) && {
    add(std::move(name), stateful(object));
    return std::move(*this);
  }
  /// Adds a value that differs between ranks; `policy` is for loads. Throws as `with`.
  template <class T>
  TrainState& per_rank(std::string name, T&& object, PerRank policy = PerRank::refuse) & {
    static_assert(
        std::is_lvalue_reference_v<T> || std::is_same_v<std::decay_t<T>, Stateful>,
        "TrainState keeps a reference: pass a variable that outlives it, not a temporary");
    add_per_rank(std::move(name), stateful(object), policy);
    return *this;
  }
  template <class T>
  TrainState&& per_rank(std::string name, T&& object, PerRank policy = PerRank::refuse) && {
    static_assert(
        std::is_lvalue_reference_v<T> || std::is_same_v<std::decay_t<T>, Stateful>,
        "TrainState keeps a reference: pass a variable that outlives it, not a temporary");
    add_per_rank(std::move(name), stateful(object), policy);
    return std::move(*this);
  }

  /// Waits for a save in the background (`load` waits too). Throws the error of that save, once.
  void wait();

 private:
  friend SaveReport save(TrainState& state, const std::string& path, const SaveOptions& options);
  friend LoadSummary load(TrainState& state, const std::string& path, const LoadOptions& options);
  void add(std::string name, Stateful object);
  void add_per_rank(std::string name, Stateful object, PerRank policy);

  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Saves the state as a checkpoint at `path`. Each rank writes what it holds; what several ranks
/// hold, one of them writes. The checkpoint appears when all ranks are done, whole or not at all.
/// Rank 0 locks the directory of `path` (not in an object store), so that no other trainer saves
/// there, until this TrainState is destroyed or saves to another directory. If a rank fails, all
/// ranks throw, and the destination is unchanged (but in an object store, the index of a replaced
/// checkpoint may be gone). Exception: if only the removal of older checkpoints fails, the error
/// says that the new one is complete. If names, shapes and layout are those of the last save (the
/// ranks compare a hash of them), the save uses the last plan again. Collective. Throws:
/// - Error(already_exists) if `path` exists and the options refuse to replace it, or if another
///   trainer holds the lock; Error(io) if writing or a rank fails;
/// - Error(mismatch) if ranks have different states, or the format cannot hold this state;
/// - Error(unsupported) naming a value that is nested too deeply, or what the format cannot hold;
/// - Error(invalid_argument) if the model was sharded after the TrainState was made, or if
///   `keep_last` is below 0.
SaveReport save(TrainState& state, const std::string& path, const SaveOptions& options = {});
inline SaveReport save(TrainState&& state, const std::string& path,
                       const SaveOptions& options = {}) {
  return save(state, path, options);
}

/// Saves a state dict of whole tensors (FULL) as a checkpoint with the same keys, like
/// `torch.save(state_dict, path)`. Writes nothing for an empty state dict, so that with
/// `rank0_only` every rank may call it. Not collective: the other ranks do not wait for the file.
/// Throws:
/// - Error(invalid_argument) naming a tensor of which this rank has only some elements;
/// - Error(already_exists) if `path` exists and `options` refuses to replace it;
/// - Error(unsupported) if the format cannot hold an entry;
/// - Error(io) if writing fails.
void save(const StateDict& state_dict, const std::string& path,
          const formats::CreateOptions& options = {});

/// Loads a checkpoint of any format, world size and strategy. Each rank reads only what it holds.
/// Checks everything before it replaces anything, except the optimizer's `step`, each Stateful
/// without `check`, and whether the names of a tied tensor have equal elements. If reading then
/// fails (damage, disk failure), tensors may be partly old and partly new; all else is unchanged.
/// Collective. If a rank fails, all ranks throw an error of the same kind. Throws:
/// - Error(mismatch) that lists everything that is missing, unexpected or does not fit, with hints
///   at useful options;
/// - Error(mismatch) if ranks opened different checkpoints, or if the checkpoint has different
///   elements for two names of a tied tensor;
/// - Error(not_found) if there is no checkpoint; Error(corruption) if it is damaged;
/// - Error(invalid_argument) if the model was sharded after the TrainState was made;
/// - Error(io) if reading or a rank fails.
LoadSummary load(TrainState& state, const std::string& path, const LoadOptions& options = {});
inline LoadSummary load(TrainState&& state, const std::string& path,
                        const LoadOptions& options = {}) {
  return load(state, path, options);
}

/// Loads the checkpoint that `latest_valid` found. The summary has a note for each newer one that
/// it skipped. Throws: Error(not_found) if it found none.
LoadSummary load(TrainState& state, const formats::LatestValid& found,
                 const LoadOptions& options = {});

}  // namespace tessera
