#pragma once

#include <torch/types.h>

#include "embedding_kernels/huge_pages.h"

namespace tessera::embedding {

/// Returns uninitialised memory for random access; on the CPU in huge pages if the system has any.
inline at::Tensor table_memory(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  at::Tensor memory = torch::empty(shape, at::TensorOptions(device).dtype(dtype));
  if (!device.is_cpu()) return memory;
  prefer_huge_pages({static_cast<std::byte*>(memory.data_ptr()), memory.nbytes()});
  return memory;
}

}  // namespace tessera::embedding
