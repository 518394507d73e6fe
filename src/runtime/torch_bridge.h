#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/base/dtype.h"

namespace tessera {

/// Returns Tessera's dtype for a torch dtype. Throws: Error(unsupported), such as for quint8.
DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);

/// Returns an uninitialised tensor in pinned host memory. The host need not wait for copies between
/// this memory and an accelerator.
at::Tensor pinned(at::IntArrayRef shape, at::ScalarType dtype);
/// Copies a tensor from the host to a device, on the current stream. Copies through pinned memory,
/// so the host does not wait. Returns the tensor itself if `device` is the CPU.
at::Tensor to_device(const at::Tensor& on_host, at::Device device);

}  // namespace tessera
