#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// The sizes of a tensor, outermost first; empty for a 0-d tensor. Units: elements.
using Shape = std::vector<std::int64_t>;

/// The most dimensions a tensor may have (torch and HDF5 both stay below).
inline constexpr std::size_t kMaxDims = 32;

/// Returns the number of elements. Requires: a shape already checked with `checked_numel`.
std::int64_t numel_of(std::span<const std::int64_t> sizes);

/// Returns the row-major strides. Units: elements. A zero size counts as one, as in torch.
Shape row_major_strides(std::span<const std::int64_t> sizes);

/// Returns `[4096, 512]`; `[]` for a 0-d tensor.
std::string shape_to_string(std::span<const std::int64_t> sizes);

}  // namespace tessera
