#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// The sizes of a tensor, outermost first; empty for a 0-d tensor. Units: elements.
///
/// Behaves like a std::vector, but needs no heap memory for up to `kInlineDims` dimensions: a large
/// checkpoint has millions of shapes, two for each Box. (c10::SmallVector does the same for torch's
/// sizes.) Throws: std::length_error for 2^31 or more dimensions.
class Shape {
 public:
  using value_type = std::int64_t;
  using size_type = std::size_t;
  using difference_type = std::ptrdiff_t;
  using reference = std::int64_t&;
  using const_reference = const std::int64_t&;
  using iterator = std::int64_t*;
  using const_iterator = const std::int64_t*;

  static constexpr std::size_t kInlineDims = 3;

  Shape() noexcept = default;
  explicit Shape(std::size_t num_dims, std::int64_t size = 0) { resize(num_dims, size); }
  Shape(std::initializer_list<std::int64_t> sizes) { assign(sizes.begin(), sizes.end()); }
  template <std::forward_iterator Iterator>
  Shape(Iterator begin, Iterator end) {
    assign(begin, end);
  }
  Shape(const std::vector<std::int64_t>& sizes) { assign(sizes.begin(), sizes.end()); }
  Shape(const Shape& other) { assign(other.begin(), other.end()); }
  Shape(Shape&& other) noexcept { swap(other); }
  Shape& operator=(const Shape& other) {
    if (this != &other) assign(other.begin(), other.end());
    return *this;
  }
  Shape& operator=(Shape&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Shape() {
    if (!is_inline()) delete[] heap();
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t* data() { return is_inline() ? slots_.data() : heap(); }
  const std::int64_t* data() const { return is_inline() ? slots_.data() : heap(); }
  iterator begin() { return data(); }
  iterator end() { return data() + size_; }
  const_iterator begin() const { return data(); }
  const_iterator end() const { return data() + size_; }
  std::int64_t& operator[](std::size_t dim) { return data()[dim]; }
  const std::int64_t& operator[](std::size_t dim) const { return data()[dim]; }
  std::int64_t& front() { return data()[0]; }
  const std::int64_t& front() const { return data()[0]; }
  std::int64_t& back() { return data()[size_ - 1]; }
  const std::int64_t& back() const { return data()[size_ - 1]; }

  void clear() { size_ = 0; }
  void reserve(std::size_t num_dims);
  void resize(std::size_t num_dims, std::int64_t size = 0) {
    reserve(num_dims);
    if (num_dims > size_) std::fill(data() + size_, data() + num_dims, size);
    size_ = static_cast<std::uint32_t>(num_dims);
  }
  void push_back(std::int64_t size) { resize(std::size_t{size_} + 1, size); }
  /// Requires: the range is not part of this shape.
  template <std::forward_iterator Iterator>
  void assign(Iterator begin, Iterator end) {
    const auto num_dims = static_cast<std::size_t>(std::distance(begin, end));
    reserve(num_dims);
    std::copy(begin, end, data());
    size_ = static_cast<std::uint32_t>(num_dims);
  }
  void swap(Shape& other) noexcept {
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    std::swap(slots_, other.slots_);
  }

  friend bool operator==(const Shape& a, const Shape& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  friend std::strong_ordering operator<=>(const Shape& a, const Shape& b) {
    return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  bool is_inline() const { return capacity_ == kInlineDims; }
  std::int64_t* heap() const { return std::bit_cast<std::int64_t*>(slots_[0]); }

  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = kInlineDims;
  std::array<std::int64_t, kInlineDims> slots_{};  // the sizes, or in slot 0 a pointer to them
};

/// The most dimensions a tensor may have. HDF5 has the same limit.
inline constexpr std::size_t kMaxDims = 32;

/// Returns the product of the sizes (1 if empty). Requires: no size is negative; product < 2^63.
std::int64_t numel_of(std::span<const std::int64_t> sizes);

/// Returns the strides of a contiguous tensor, in elements. As in torch, a size of 0 counts as 1.
Shape row_major_strides(std::span<const std::int64_t> sizes);

/// Returns the sizes as text: `[4096, 512]`; `[]` for a 0-d tensor.
std::string shape_to_string(std::span<const std::int64_t> sizes);

}  // namespace tessera
