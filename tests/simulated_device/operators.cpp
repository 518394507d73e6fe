// The operators that have a kernel for the simulated device: new tensors, views, copies, dropout,
// autocast. fallback.cpp runs all others.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <string_view>

#include "simulated_device/memory.h"
#include "simulated_device/streams.h"

namespace tessera::sim {
namespace {

using at::Tensor;
using Kind = AccessLog::Kind;

// --- new tensors

constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

at::Device device_or_current(std::optional<at::Device> device) {
  return device.value_or(at::Device(kSim, current_device()));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout> /*layout*/, std::optional<at::Device> device,
             std::optional<bool> /*pin_memory*/, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard on(device_or_current(device));
  return at::detail::empty_generic(size, device_allocator(), kKey, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> /*layout*/,
                     std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  const c10::DeviceGuard on(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKey,
                                           c10::dtype_or_default(dtype));
}

// --- views

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                  std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size,
                      std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor view(const Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}
Tensor unfold(const Tensor& self, std::int64_t dim, std::int64_t size, std::int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
Tensor& set_storage_offset(Tensor& self, at::Storage source, std::int64_t offset,
                           c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<std::int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::cpu::set_(self, std::move(source), 0, {numel}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}
void record_stream_of(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// --- copies

std::size_t hash_of(const Tensor& host) {
  return std::hash<std::string_view>{}(
      {static_cast<const char*>(host.data_ptr()), extent_of(host)});
}

EventState end_of(const c10::Stream& stream) {
  const Stream& state = state_of(stream);
  const std::lock_guard lock(streams().mutex);
  return event_at_end(state);
}

/// Copies as CUDA does, on the current stream of the source's device. The copy waits for earlier
/// work of the current stream of the target's device. Later work of that stream waits for the copy.
void copy_between_devices(const Tensor& self, const Tensor& dst) {
  const c10::Stream from = current_stream(self.device().index());
  const c10::Stream to = current_stream(dst.device().index());
  const auto let_wait = [](const c10::Stream& waiting, const c10::Stream& awaited) {
    if (waiting != awaited) make_wait(state_of(waiting), end_of(awaited));
  };
  let_wait(from, to);
  launch(from, "copy", {self}, {dst},
         [to = in_kernel(dst), source = in_kernel(self)] { to.copy_(source); });
  let_wait(to, from);
}

/// Copies from the host. Pageable (not pinned) memory is read at the call, as by CUDA. Pinned
/// memory is read when the copy runs. If the host writes to it before, this is reported as a race.
void copy_to_device(const Tensor& self, const Tensor& dst, bool non_blocking) {
  const c10::Stream stream = current_stream(dst.device().index());
  const bool is_later = non_blocking && self.numel() > 0 && self.is_pinned();
  if (!is_later) {
    const Tensor staged = non_blocking ? self.clone() : self;
    launch(stream, "copy from the host", {}, {dst},
           [to = in_kernel(dst), staged] { to.copy_(staged); });
    if (!non_blocking) {
      report_waiting_operator(stream.device_index(), "copy from the host");
      synchronize_stream(stream);
    }
    return;
  }
  const bool is_written_by_device = !is_idle(self.data_ptr(), Kind::write);
  const std::size_t hash = is_written_by_device ? 0 : hash_of(self);
  launch(stream, "copy from the host", {}, {dst},
         [to = in_kernel(dst), self, hash, is_written_by_device] {
           if (!is_written_by_device && hash_of(self) != hash) {
             report_race("the host writes to pinned memory while it is copied to the device");
           }
           to.copy_(self);
         });
  note_pinned_copy(self.data_ptr(), end_of(stream), Kind::read);
}

/// Copies to the host. The host waits, unless `dst` is pinned and the copy is non-blocking. Then
/// `dst` is first filled with bytes 0xFF (NaN), so that a read before the copy gets no old values.
void copy_to_host(const Tensor& self, const Tensor& dst, bool non_blocking) {
  const c10::Stream stream = current_stream(self.device().index());
  const bool is_later = non_blocking && dst.numel() > 0 && dst.is_pinned();
  if (is_later && is_idle(dst.data_ptr(), Kind::read) && is_idle(dst.data_ptr(), Kind::write)) {
    if (dst.is_contiguous()) std::memset(dst.data_ptr(), 0xFF, dst.nbytes());
  }
  launch(stream, "copy to the host", {self}, {},
         [dst, from = in_kernel(self)] { dst.copy_(from); });
  if (!is_later) {
    report_waiting_operator(stream.device_index(), "copy to the host");
    return synchronize_stream(stream);
  }
  note_pinned_copy(dst.data_ptr(), end_of(stream), Kind::write);
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (is_on_device(self) && is_on_device(dst)) {
    copy_between_devices(self, dst);
  } else if (is_on_device(dst)) {
    copy_to_device(self, dst, non_blocking);
  } else {
    copy_to_host(self, dst, non_blocking);
  }
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}
c10::Scalar local_scalar_dense(const Tensor& self) {
  const Tensor on_host = at::empty(self.sizes(), self.options().device(c10::kCPU));
  copy_to_host(self, on_host, false);
  return at::native::_local_scalar_dense_cpu(on_host);
}

// --- random numbers: dropout, because the CPU's kernel has no argument for a generator

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> /*train*/) {
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

// Module::to and set_data call this. TensorImpl's own list of dense device types lacks PrivateUse1.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  const auto is_dense = [](const Tensor& tensor) {
    return tensor.layout() == c10::kStrided && (tensor.is_cpu() || is_on_device(tensor));
  };
  return is_dense(self) && is_dense(from);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream_of);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_dropout", native_dropout);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

// Autocast for only those operators that the tests' models use.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

}  // namespace tessera::sim
