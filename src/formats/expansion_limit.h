#pragma once

#include <cstdint>
#include <limits>

namespace tessera::formats {

/// Returns how many bytes all tensors of a checkpoint may have together. The limit is needed
/// because tensors may share stored bytes (views of one storage, strides of 0): a small hostile
/// file could describe any number of bytes to read. `stored_nbytes` is the size of all files
/// together.
constexpr std::uint64_t max_tensor_nbytes(std::uint64_t stored_nbytes) {
  constexpr std::uint64_t kFactor = 16;
  constexpr std::uint64_t kFloor = std::uint64_t{1} << 30;
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  return stored_nbytes > (kMax - kFloor) / kFactor ? kMax : kFactor * stored_nbytes + kFloor;
}

}  // namespace tessera::formats
