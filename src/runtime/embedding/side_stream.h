#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace tessera::embedding {

/// A stream of an accelerator for copies and for messages between ranks, beside the streams that
/// compute. Streams wait for each other through events; the host never waits. Thread-safe.
class SideStream {
 public:
  /// Requires: `device` is not the CPU.
  explicit SideStream(at::Device device);

  at::Device device() const { return stream_.device(); }
  const c10::Stream& stream() const { return stream_; }
  /// Returns this thread's current stream of the device.
  c10::Stream current() const;

  /// Makes later work of this stream wait for all work that is already on the current stream.
  void wait_for_current() const;
  /// Returns an event that happens when all work that is already on this stream is done.
  c10::Event record() const;
  /// Makes later work of the current stream wait for `event`.
  void let_current_wait(const c10::Event& event) const;
  /// Tells the allocator that the current stream uses `tensor`, which another stream allocated (as
  /// Tensor::record_stream does): its memory is not reused before the current stream is done with
  /// it. Ignores undefined tensors.
  void note_use(const at::Tensor& tensor) const;

  /// Copies a tensor to the device through pinned memory, and returns the copy. Requires: this
  /// stream is current.
  at::Tensor to_device(const at::Tensor& on_host) const;

 private:
  c10::Stream stream_;
};

}  // namespace tessera::embedding
