#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace tessera::embedding {

/// A stream of an accelerator beside the streams that compute. Events order its work; the host does
/// not wait unless a function says so. Thread-safe.
class SideStream {
 public:
  /// Requires: `device` is not the CPU.
  explicit SideStream(at::Device device);

  at::Device device() const { return stream_.device(); }
  const c10::Stream& stream() const { return stream_; }
  /// Returns this thread's current stream of the device.
  c10::Stream current() const;

  /// Lets later work of this stream run after the present work of the current stream.
  void wait_for_current() const;
  /// Returns an event at the end of this stream's present work.
  c10::Event record() const;
  /// Lets later work of the current stream run after `event`.
  void let_current_wait(const c10::Event& event) const;
  /// Tells the allocator that the current stream uses `tensor`, which this stream allocated: the
  /// tensor's memory is not reused before the current stream is done with the tensor. Ignores
  /// undefined tensors.
  void note_use(const at::Tensor& tensor) const;

  /// Returns a copy on the device, by way of pinned memory. Requires: this stream is current.
  at::Tensor to_device(const at::Tensor& on_host) const;

 private:
  c10::Stream stream_;
};

/// Returns pinned host memory.
at::Tensor pinned(at::IntArrayRef shape, at::ScalarType dtype);

}  // namespace tessera::embedding
