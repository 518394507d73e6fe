#include "tessera/base/shape.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera {

void Shape::reserve(std::size_t num_dims) {
  if (num_dims <= capacity_) return;
  if (num_dims > std::numeric_limits<std::uint32_t>::max() / 2) {
    throw std::length_error("a shape of too many dimensions");
  }
  const std::uint32_t capacity = std::max(static_cast<std::uint32_t>(num_dims), 2 * capacity_);
  auto* const grown = new std::int64_t[capacity];
  std::copy(begin(), end(), grown);
  if (!is_inline()) delete[] heap();
  slots_[0] = std::bit_cast<std::int64_t>(grown);
  capacity_ = capacity;
}

std::int64_t numel_of(std::span<const std::int64_t> sizes) {
  const auto numel = checked_numel(sizes);
  TESSERA_CHECK(numel.has_value());
  return *numel;
}

Shape row_major_strides(std::span<const std::int64_t> sizes) {
  Shape strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    const auto next = checked_mul(stride, std::max<std::int64_t>(sizes[d], 1));
    // An overflow does no harm: this product is the outermost one, which is not used as a stride,
    // or the tensor is empty, and its strides are never used.
    stride = next.value_or(0);
  }
  return strides;
}

std::string shape_to_string(std::span<const std::int64_t> sizes) {
  std::string text = "[";
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(sizes[d]);
  }
  return text + "]";
}

}  // namespace tessera
