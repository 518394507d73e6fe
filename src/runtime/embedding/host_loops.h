#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/base/parallel.h"

namespace tessera::embedding {

/// Returns the elements of an int64 tensor in host memory.
inline const std::int64_t* longs(const at::Tensor& tensor) {
  return tensor.const_data_ptr<std::int64_t>();
}

/// Calls `body(each)` for all elements of a vector, in parallel.
template <class T, class Body>
void for_all(std::vector<T>& vector, const Body& body) {
  parallel_for(static_cast<std::int64_t>(vector.size()), at::get_num_threads(), {},
               [&](std::int64_t i) { body(vector[static_cast<std::size_t>(i)]); });
}

}  // namespace tessera::embedding
