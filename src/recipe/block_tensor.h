#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"
#include "tessera/layout/region.h"

// [Note: Blocks] A tensor that a recipe makes is a list of blocks. A block is a box of the tensor
// whose elements all come from one tensor of the source, at constant strides: element `i` of the
// box (coordinates within the box) is element `offset + sum(i[d] * strides[d])` of the source
// tensor in row-major order. Every operation on shapes maps blocks to blocks exactly, so operations
// follow one another without tensors in between.

namespace tessera::recipe {

/// The `source` of a block whose elements are all the same constant.
inline constexpr std::uint32_t kConstant = std::numeric_limits<std::uint32_t>::max();

/// See [Note: Blocks]. Units: elements. Strides are not negative.
struct Block {
  Box box;                   // which box of the tensor this block is; never empty
  std::uint32_t source = 0;  // index of a tensor of the source, or kConstant
  std::int64_t offset = 0;
  Shape strides{};   // by dimension of the box; no meaning for dimensions of size 1
  double added = 0;  // added to each element of the source; for kConstant, the value itself
};

/// A tensor as blocks: each element is in exactly one. A tensor without elements has no blocks.
struct BlockTensor {
  DType dtype = DType::float32;
  Shape shape{};
  std::vector<Block> blocks{};
};

/// The exception for an operation that does not fit a tensor: what it expected, and what it found.
struct ShapeProblem : std::runtime_error {
  ShapeProblem(std::string expected_text, std::string found_text)
      : std::runtime_error(expected_text + "; " + found_text),
        expected(std::move(expected_text)),
        found(std::move(found_text)) {}
  std::string expected;
  std::string found;
};

/// The maximum number of blocks of one tensor. A reshape of a transposed tensor can need many.
inline constexpr std::size_t kMaxBlocks = std::size_t{1} << 18;

/// Returns a tensor that equals the whole source tensor number `source`.
BlockTensor whole_tensor_of(std::uint32_t source, DType dtype, const Shape& shape);

/// Returns the tensor of this shape that has `value` in all elements.
BlockTensor constant_tensor(DType dtype, const Shape& shape, double value);

// The operations. Requires: each `dim` exists (dim_of checks). Throws: ShapeProblem.

/// Returns `dim` as an index from 0. A negative `dim` counts from the end (-1: the last one).
std::size_t dim_of(std::int64_t dim, std::size_t num_dims);

/// Cuts a tensor along a dimension into slices of these sizes. Requires: sizes add up to its size.
std::vector<BlockTensor> cut(const BlockTensor& tensor, std::size_t dim,
                             std::span<const std::int64_t> sizes);
/// Cuts a tensor into slices of size 1 along a dimension, and removes this dimension from them.
std::vector<BlockTensor> cut_slices(const BlockTensor& tensor, std::size_t dim);
/// Concatenates tensors along a dimension. Requires: at least one.
BlockTensor concat(std::vector<BlockTensor> tensors, std::size_t dim);
/// Stacks tensors of one shape along a new dimension `dim`, which may come after all others.
/// Requires: at least one.
BlockTensor stack(std::vector<BlockTensor> tensors, std::size_t dim);
/// Permutes dimensions: dimension `d` of the result is dimension `order[d]` of the tensor.
/// Requires: `order` is a permutation.
BlockTensor permute(BlockTensor tensor, std::span<const std::size_t> order);
/// Replaces a dimension by several. Requires: sizes of 0 or more, whose product is the size of
/// `dim`.
BlockTensor unflatten(BlockTensor tensor, std::size_t dim, std::span<const std::int64_t> sizes);
/// Replaces the `num_dims` dimensions from `dim` on by one dimension.
BlockTensor flatten(BlockTensor tensor, std::size_t dim, std::size_t num_dims);
/// Gives a tensor another shape with the same number of elements, as torch.reshape does.
BlockTensor reshape(BlockTensor tensor, const Shape& shape);

/// Returns whether the tensor equals the whole source tensor number `source`, which has this shape.
bool is_whole(const BlockTensor& tensor, std::uint32_t source, const Shape& shape);

/// Returns whether two tensors are equal whatever the elements of the source are. Also returns
/// false if they are equal but cut into different blocks.
bool have_same_blocks(const BlockTensor& a, const BlockTensor& b);

}  // namespace tessera::recipe
