#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "runtime/fsdp/rate_limiter.h"

namespace tessera::fsdp {

/// The streams of a device that one root works on. Of a device in step with the host, such as the
/// CPU, all are one, and waiting is nothing. Goes through c10's guards of devices: no CUDA here.
class Streams {
 public:
  explicit Streams(at::Device device);

  const c10::Stream default_stream;  // the compute stream of the thread that made this
  const c10::Stream unshard;         // gathers; holds the memory of unsharded flat parameters
  const c10::Stream pre_unshard;     // what goes before them: casts, copies from the host
  const c10::Stream post_backward;   // reduces gradients over the shard group
  const c10::Stream all_reduce;      // and, in hybrid strategies, over the replicate group

  /// Whether the host may be ahead of the device.
  bool run_behind_host() const { return runs_behind_host_; }
  /// Returns the stream that operators of this thread run on.
  c10::Stream compute() const;

  /// Makes what `waiting` gets from here on run after all that `awaited` got so far. The host does
  /// not wait.
  void make_wait(const c10::Stream& waiting, const c10::Stream& awaited) const;
  /// Tells the allocator that `stream` reads `tensor`, which has its memory from another one: when
  /// it is given back, nobody gets it before the stream has come so far.
  void note_use(const at::Tensor& tensor, const c10::Stream& stream) const;
  /// Returns what is reached when the compute stream has come so far.
  std::unique_ptr<FreeEvent> record_event() const;

 private:
  at::Device device_;
  bool runs_behind_host_;
};

}  // namespace tessera::fsdp
