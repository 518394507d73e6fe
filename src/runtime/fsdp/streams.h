#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "runtime/fsdp/rate_limiter.h"

namespace tessera::fsdp {

/// The device streams of one root module. On a synchronous device, such as the CPU, all members are
/// the same stream and waiting does nothing. Uses c10's device guards, not CUDA.
class Streams {
 public:
  explicit Streams(at::Device device);

  const c10::Stream default_stream;  // current stream of the thread that constructed this
  const c10::Stream unshard;         // all-gathers; owns the memory of unsharded flat parameters
  const c10::Stream pre_unshard;     // before all-gathers: casts, copies from the host
  const c10::Stream post_backward;   // reduces gradients over the shard group
  const c10::Stream all_reduce;      // reduces gradients over the replicate group

  /// Returns whether the device is asynchronous to the host.
  bool run_behind_host() const { return runs_behind_host_; }
  /// Returns the stream on which this thread's operators run.
  c10::Stream compute() const;

  /// Makes future work on the stream `waiting` wait for all work that is on `awaited` now. The host
  /// does not wait.
  void make_wait(const c10::Stream& waiting, const c10::Stream& awaited) const;
  /// Tells the allocator that `stream` uses `tensor`, which was allocated on another stream. If
  /// `tensor` is freed, its memory is then not reused before `stream` is done with the tensor.
  void note_use(const at::Tensor& tensor, const c10::Stream& stream) const;
  /// Records an event at the end of the compute stream's present work.
  std::unique_ptr<FreeEvent> record_event() const;

 private:
  at::Device device_;
  bool runs_behind_host_;
};

}  // namespace tessera::fsdp
