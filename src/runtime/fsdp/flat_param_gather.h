#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/fsdp/flat_param_contents.h"
#include "runtime/fsdp/flat_param_storage.h"
#include "runtime/fsdp/spare_memory.h"
#include "runtime/fsdp/streams.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::fsdp {

/// All-gathers a flat parameter into the buffer of a FlatParamStorage, and frees the buffer's
/// memory. Does nothing if there is no buffer: the parameters are then always whole.
///
/// Life cycle, within a pass (one forward and its backward): `prepare`, `start`, `finish`,
/// `reshard`, in this order, as often as needed. `finish` does nothing if no all-gather was
/// started, and `reshard` does nothing if there is nothing to free. Not thread-safe.
class FlatParamGather {
 public:
  /// `contents` and `storage` must outlive this object.
  FlatParamGather(const FlatParamContents& contents, const FlatParamStorage& storage)
      : contents_(contents), storage_(storage) {}

  void enter_pass(const std::shared_ptr<const Streams>& streams,
                  const std::shared_ptr<SpareMemory>& memory);

  /// Returns whether the buffer holds the gathered parameters.
  bool is_unsharded() const { return residence_ == Residence::unsharded; }
  /// Casts the shard, or copies it to the device, before the all-gather. Makes no whole tensor.
  void prepare();
  /// Starts the all-gather. Collective over the shard group.
  void start();
  /// Makes later operators wait for the all-gather that `start` started.
  void finish();
  /// Takes part in an all-gather for other ranks. This rank's parameters do not change. Allocates
  /// the whole flat parameter temporarily. Collective over the shard group.
  void join();
  /// Frees the gathered parameters, after `finish`.
  void reshard();
  /// Waits for an all-gather that has been started, even if it fails. `reshard` may follow.
  void abort() noexcept;

 private:
  enum class Residence { sharded, gathering, unsharded };
  at::Tensor cast_own_shard() const;

  const FlatParamContents& contents_;
  const FlatParamStorage& storage_;
  std::shared_ptr<const Streams> streams_;  // of the last pass; null before the first
  std::shared_ptr<SpareMemory> memory_;     // of the last pass; null before the first
  Residence residence_ = Residence::sharded;
  at::Tensor cast_shard_;  // alive until the all-gather ends
  dist::Pending pending_;
};

}  // namespace tessera::fsdp
