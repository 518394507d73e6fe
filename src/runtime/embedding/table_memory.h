#pragma once

#include <torch/types.h>

#include "embedding_kernels/huge_pages.h"

namespace tessera::embedding {

/// Returns an uninitialised tensor for a table, whose rows are read in random order. On the CPU,
/// its memory is in huge pages if the system offers them.
inline at::Tensor table_memory(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  at::Tensor memory = torch::empty(shape, at::TensorOptions(device).dtype(dtype));
  if (!device.is_cpu()) return memory;
  prefer_huge_pages({static_cast<std::byte*>(memory.data_ptr()), memory.nbytes()});
  return memory;
}

}  // namespace tessera::embedding
