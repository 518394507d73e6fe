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

/// What becomes of a value that differs between ranks when it is loaded at another world size.
enum class PerRank {
  refuse,     // loading is an error that names it
  replicate,  // rank r gets that of rank r % N of the N that were saved
  merge,      // every rank gets the list of all
  split,      // lists are joined and dealt out anew, in equal runs; random numbers branch off
  drop,       // it stays as it is
};

/// How a checkpoint is saved. To be the same on all ranks, but for buffers and the file system.
struct SaveOptions {
  /// Ranks write native and dcp together. The others are one process's: ranks write native parts
  /// beside the destination, which rank 0 then streams into it, so that for that time there is room
  /// for two on the disk, and ranks wait for rank 0.
  formats::Format format{};
  /// What becomes of a checkpoint that is at the path already, perhaps a damaged one. `replace`
  /// puts the new one in its place at once; what is no checkpoint is refused by either.
  OverwritePolicy overwrite = OverwritePolicy::refuse;
  formats::NativeWriteOptions native{};  // for native alone
  /// Whether the optimizer's groups are told for each parameter: see `flatten_optim_state_dict`.
  bool flatten_optimizer_state_dict = false;
  /// Whether to return when the state has been copied, and to write in the background. What goes
  /// wrong there the next save or `wait` throws.
  bool async = false;
  /// How many checkpoints to keep of those beside this one whose names differ from its own in the
  /// last number alone (`step-900` beside `step-1000`), the newest by that number, and this one; 0:
  /// all. Others go when this one is complete.
  int keep_last = 0;
  /// Of this rank's buffers. Units: bytes.
  std::uint64_t memory_nbytes = std::uint64_t{64} << 20;
  /// How long a rank waits for the slowest one, in this save and from then on. None: as long as in
  /// a collective of the mesh.
  std::optional<std::chrono::milliseconds> timeout{};
  /// What this rank's files are written through. Must outlive the save; locks are the operating
  /// system's own, whatever it is.
  FileSystem* file_system = &FileSystem::posix();
};

/// What a save has done on this rank.
struct SaveReport {
  std::uint64_t nbytes_written = 0;    // of tensors, by this rank
  bool has_planned = true;             // false: the layout is that of the save before
  std::chrono::nanoseconds stalled{};  // how long the trainer was held up
};

/// What loading lets pass; by default nothing.
struct LoadOptions {
  bool allow_missing = false;     // what the checkpoint lacks stays as it is
  bool allow_unexpected = false;  // what the trainer lacks is left out
  bool allow_cast = false;        // another floating dtype, of the optimizer's state too
  bool allow_lossy = false;       // merge state that is kept per column shard
  /// Globs over names such as `model.*`; the rest stays as it is. A value, a parameter's state and
  /// the optimizer's groups are taken whole or not at all: a glob for a part is an error.
  std::vector<std::string> only{};
  /// From prefixes of the checkpoint's names to others; the first that fits is taken. Where a
  /// parameter is renamed (`{"model.fc.", "model.up."}`), its optimizer state and its place in the
  /// groups are, too.
  std::vector<reshard::Rename> renames{};
  std::uint64_t memory_nbytes = std::uint64_t{64} << 20;  // of this rank's buffers; bytes
  const FileSystem* file_system = &FileSystem::posix();   // what this rank's files are read through
};

/// What a load has found and taken.
struct LoadSummary {
  std::string path;
  formats::Format format{};
  int saved_world_size = 1;
  std::uint64_t nbytes_loaded = 0;      // of tensors, to this rank
  std::vector<formats::Finding> notes;  // what was let pass
};

/// Returns what was loaded in one line, and what was let pass a line each, without a line feed at
/// the end.
std::string summary_to_string(const LoadSummary& summary);

/// A trainer's state as one thing to save and to load: a model, an optimizer, and what else there
/// is by name. Refers to all of it, which must outlive it. Keys are those of PyTorch's distributed
/// checkpoint of `{"model": …, "optim": …, <name>: …}`.
///
/// Keeps what one save can use of the one before: the plan, buffers, and a connection between the
/// ranks of its own, so that saving in the background never meets the trainer's collectives. Making
/// one is collective over the model's mesh; all ranks make theirs in the same order. Waits for its
/// save when it dies; a failure that was not asked for by then is a warning of torch. Not
/// thread-safe.
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

  /// Adds a value that is the same on all ranks; rank 0's is saved. See `stateful`.
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
  /// Adds a value of which every rank has its own.
  template <class T>
  TrainState& per_rank(std::string name, T&& object, PerRank policy = PerRank::refuse) & {
    static_assert(std::is_lvalue_reference_v<T> || std::is_same_v<std::decay_t<T>, Stateful>,
                  "what is saved must outlive the TrainState");
    add_per_rank(std::move(name), stateful(object), policy);
    return *this;
  }
  template <class T>
  TrainState&& per_rank(std::string name, T&& object, PerRank policy = PerRank::refuse) && {
    static_assert(std::is_lvalue_reference_v<T> || std::is_same_v<std::decay_t<T>, Stateful>,
                  "what is saved must outlive the TrainState");
    add_per_rank(std::move(name), stateful(object), policy);
    return std::move(*this);
  }

  /// Waits for a save in the background. Throws what went wrong in it, once.
  void wait();

 private:
  friend SaveReport save(TrainState& state, const std::string& path, const SaveOptions& options);
  friend LoadSummary load(TrainState& state, const std::string& path, const LoadOptions& options);
  void add(std::string name, Stateful object);
  void add_per_rank(std::string name, Stateful object, PerRank policy);

  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Saves the state as a checkpoint at `path`, whole or not at all: each rank writes its share, and
/// when all are done it appears there. Replicas are written once, spread over the ranks that hold
/// them. Ranks agree on what they write without comparing it tensor by tensor, and a layout that
/// has not changed is not planned again. Between saves the directory of `path` is held with a lock,
/// so that no other trainer writes there.
/// Collective. Throws on all ranks where any fails: Error(already_exists), Error(io),
/// Error(mismatch) where ranks have different states, Error(unsupported) naming a value that is
/// nested too deep, Error(invalid_argument) where the model was sharded after the TrainState was
/// made; then the destination is what it was. Where
/// only the removal of older checkpoints failed, the error says that this one is complete.
SaveReport save(TrainState& state, const std::string& path, const SaveOptions& options = {});
inline SaveReport save(TrainState&& state, const std::string& path,
                       const SaveOptions& options = {}) {
  return save(state, path, options);
}

/// Writes a state dict of whole tensors (FULL) as one checkpoint, under its own keys, as
/// `torch.save(state_dict, path)` does. Of an empty one it writes nothing, so that with
/// `rank0_only` every rank may call it. Not collective: other ranks are not told when it is there.
/// Throws: Error(invalid_argument) naming a tensor of which there is a part only;
/// Error(already_exists), Error(unsupported), Error(io).
void save(const StateDict& state_dict, const std::string& path,
          const formats::CreateOptions& options = {});

/// Loads a checkpoint of any format, world size and strategy: reads what this rank holds, and no
/// more. Everything is checked before anything is replaced; where reading itself fails (damage, a
/// dead disk), tensors may be part old, part new, and all else is what it was.
/// Collective. Throws on all ranks where any fails, errors of the same kind where one does:
/// Error(mismatch) that lists all that is missing, unexpected or does not fit, with hints at the
/// options that may be meant, or says that ranks have opened different checkpoints;
/// Error(corruption), Error(not_found), Error(io).
LoadSummary load(TrainState& state, const std::string& path, const LoadOptions& options = {});
inline LoadSummary load(TrainState&& state, const std::string& path,
                        const LoadOptions& options = {}) {
  return load(state, path, options);
}

/// Loads the newest checkpoint in a directory that `latest_valid` found.
LoadSummary load(TrainState& state, const formats::LatestValid& found,
                 const LoadOptions& options = {});

}  // namespace tessera
