#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "runtime/fsdp/flat_param_contents.h"
#include "runtime/fsdp/flat_param_reduction.h"
#include "runtime/fsdp/flat_param_storage.h"

namespace tessera::fsdp {

/// Returns a tensor for `.grad` with the memory of `elements`, this rank's shard of a gradient. It
/// is not a view, because Optimizer::zero_grad cannot detach a view in place. If the parameter is
/// sharded, the result has kTouchKey, so that torch's norms refuse it (touch_dispatch.cpp).
at::Tensor sharded_gradient(const FlatParamContents& contents, const at::Tensor& elements);

/// Collects the gradients of one flat parameter (FlatParamHandle) from `.grad`, averages them over
/// the ranks, and puts this rank's shard of the average into `.grad`.
///
/// Life cycle, within a pass. `put_aside` keeps the sharded `.grad` of earlier passes. `take` moves
/// each gradient of the backward from `.grad` into one flat gradient. `start_reduce` and
/// `finish_reduce` average the flat gradient over the ranks, or `keep_unsynced` keeps it for a
/// later pass. `leave_pass` gives each parameter its shard of the average. Does not own the
/// parameters' memory. Not thread-safe.
class FlatParamGradients {
 public:
  /// `contents` and `storage` must outlive this.
  FlatParamGradients(const FlatParamContents& contents, const FlatParamStorage& storage);

  /// Returns whether this object averages, casts or moves gradients. If not, they stay in `.grad`.
  bool are_reduced() const { return are_reduced_; }

  void enter_pass(const std::shared_ptr<const Streams>& streams,
                  const std::shared_ptr<SpareMemory>& memory);
  /// Puts the averages of this pass into `.grad`. If `put_aside` saved an earlier `.grad`, restores
  /// it and adds the average to it. Requires: `finish_reduce` or `keep_unsynced` was called for all
  /// gradients that `take` moved.
  void leave_pass();
  /// Drops the gradients of this pass. The caller must call `leave_pass` afterwards.
  void abort_pass() noexcept;

  // --- gradients of the backward
  /// Moves the parameter's `.grad` aside, once in a pass, so that autograd does not add a full
  /// gradient to a sharded one.
  void put_aside(std::size_t index);
  /// Moves the parameter's `.grad` into the flat gradient. Throws: Error(unsupported) for a sparse
  /// gradient, or one with a graph (create_graph).
  void take(std::size_t index);
  /// Returns whether there are gradients to reduce: of this pass, or kept by an earlier one.
  bool has_any() const { return has_taken() || has_unsynced(); }
  bool has_taken() const { return num_taken_ > 0; }
  bool has_all() const { return num_taken_ == num_trainable_; }

  // --- averages over the ranks
  /// Starts averaging the flat gradient over the ranks; missing gradients count as zero.
  /// Collective.
  void start_reduce();
  bool is_reducing() const { return reduction_.is_in_flight(); }
  /// Finishes the average; later operators wait for it. Collective for hybrid strategies.
  void finish_reduce() { reduction_.finish(); }
  /// Returns for each parameter whether this rank has a gradient, reduced already or not: of this
  /// pass, or kept from an earlier pass under NoSyncScope.
  std::vector<bool> contributed() const;
  /// Sets for which parameters any rank contributed a gradient: these parameters get a reduced
  /// gradient.
  void set_reduced(const std::vector<bool>& any_contributed) { was_reduced_ = any_contributed; }

  // --- passes under NoSyncScope
  /// Keeps the flat gradient of this pass for the next pass that reduces.
  void keep_unsynced();
  bool has_unsynced() const { return unsynced_.flat.defined(); }
  void drop_unsynced() { unsynced_.clear(); }

 private:
  /// A flat gradient of some of the parameters.
  struct FlatGradient {
    at::Tensor flat;        // [padded numel], divided by predivide_factor; undefined if none
    std::vector<bool> has;  // one per parameter; if false, its elements are not initialised
    void clear();
  };
  void clear_taken();
  void take_unused_unsynced();
  void reuse_unsynced();

  const FlatParamContents& contents_;
  bool are_reduced_;
  std::size_t num_trainable_ = 0;
  std::size_t num_taken_ = 0;
  FlatGradient taken_;     // of this pass, plus the kept ones of `unsynced_`; not reduced yet
  FlatGradient unsynced_;  // of earlier passes under NoSyncScope
  FlatParamReduction reduction_;
  std::vector<bool> was_reduced_;  // one per parameter: its gradient was reduced in this pass
  // The `.grad` that `put_aside` has kept in this pass, by parameter; an undefined tensor if
  // `.grad` was undefined.
  std::vector<std::optional<at::Tensor>> put_aside_;
};

}  // namespace tessera::fsdp
