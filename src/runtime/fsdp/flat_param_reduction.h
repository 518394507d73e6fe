#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/fsdp/flat_param_contents.h"
#include "runtime/fsdp/flat_param_storage.h"
#include "runtime/fsdp/spare_memory.h"
#include "runtime/fsdp/streams.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// Averages a flat gradient over the ranks. If the strategy shards, runs a reduce-scatter over the
/// shard group and then, for hybrid strategies, an all-reduce over the replicate group. If the
/// strategy does not shard, runs one all-reduce over the replicate group. One gradient is in flight
/// at a time. If a pass reduces several times, the averages are added together. Not thread-safe.
///
/// On the CPU, if the strategy does not shard, the gradient's memory is kept, and the next pass
/// after `zero_grad` uses it again, because fresh pages cost time (see SpareMemory).
class FlatParamReduction {
 public:
  /// `contents` and `storage` must outlive this object.
  FlatParamReduction(const FlatParamContents& contents, const FlatParamStorage& storage)
      : contents_(contents), storage_(storage) {}

  void enter_pass(const std::shared_ptr<const Streams>& streams,
                  const std::shared_ptr<SpareMemory>& memory);

  /// Returns a flat gradient of all parameters, to be filled for `start`. Shape: [padded numel].
  /// Its memory is not initialised.
  at::Tensor make_unsharded_grad();
  /// Takes the memory of a gradient that `make_unsharded_grad` returned, for later gradients.
  /// Requires: the gradient was not given to `start`, and no other tensor uses its memory.
  void free(const at::Tensor& unsharded_grad) { memory_->free(unsharded_grad); }
  /// Returns the number to divide gradients by before `start`. `finish` does the rest of the
  /// division.
  double predivide_factor() const;

  /// Starts to average `unsharded_grad` over the ranks, after all work now on the compute stream.
  /// Collective. Requires: it is divided by `predivide_factor()`; no other gradient is in flight.
  void start(at::Tensor unsharded_grad);
  bool is_in_flight() const { return unsharded_grad_.defined(); }
  /// Adds the average to `sharded_grad`; later operators wait for it. Does nothing if no average is
  /// in flight. Collective for hybrid strategies.
  void finish();
  /// Waits for an average that has been started, even if it fails, and drops it.
  void abort() noexcept;

  /// Returns this rank's shard of the pass's averages; undefined before the first average. Shape:
  /// [sharded_numel].
  const at::Tensor& sharded_grad() const { return sharded_grad_; }
  void drop_sharded_grad() { sharded_grad_ = at::Tensor(); }

 private:
  void start_all_reduce();

  const FlatParamContents& contents_;
  const FlatParamStorage& storage_;
  std::shared_ptr<const Streams> streams_;  // of the last pass; null before the first
  std::shared_ptr<SpareMemory> memory_;     // of the last pass; null before the first
  at::Tensor unsharded_grad_;               // the gradient in flight; undefined if none is
  at::Tensor sharded_grad_in_flight_;
  dist::Pending pending_;
  bool is_all_reducing_ = false;  // whether the all-reduce of a hybrid strategy has started
  at::Tensor sharded_grad_;
  at::Tensor shown_;  // the gradient on the CPU whose memory `.grad`s use or have used
};

}  // namespace tessera::fsdp
