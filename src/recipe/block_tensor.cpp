#include "recipe/block_tensor.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

Shape without(const Shape& sizes, std::size_t dim) {
  Shape result;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (d != dim) result.push_back(sizes[d]);
  }
  return result;
}

Shape with(const Shape& sizes, std::size_t dim, std::int64_t size) {
  Shape result;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (d == dim) result.push_back(size);
    result.push_back(sizes[d]);
  }
  if (dim == sizes.size()) result.push_back(size);
  return result;
}

/// Returns sizes with `[dim, dim + count)` replaced by `inner`.
Shape replaced(const Shape& sizes, std::size_t dim, std::size_t count,
               std::span<const std::int64_t> inner) {
  Shape result;
  for (std::size_t d = 0; d < dim; ++d) result.push_back(sizes[d]);
  for (const std::int64_t size : inner) result.push_back(size);
  for (std::size_t d = dim + count; d < sizes.size(); ++d) result.push_back(sizes[d]);
  return result;
}

void check_num_blocks(std::size_t num_blocks) {
  if (num_blocks <= kMaxBlocks) return;
  throw ShapeProblem("at most " + std::to_string(kMaxBlocks) + " boxes with constant strides",
                     "more (a reshape of a transposed tensor?)");
}

void check_num_dims(std::size_t num_dims) {
  if (num_dims <= kMaxDims) return;
  throw ShapeProblem("at most " + std::to_string(kMaxDims) + " dimensions",
                     std::to_string(num_dims));
}

std::int64_t checked_sum(std::int64_t a, std::int64_t b) {
  if (const auto sum = checked_add(a, b)) return *sum;
  throw ShapeProblem("a size below 2^63", "a larger size");
}

void check_same_shape(const Shape& a, const Shape& b) {
  if (a == b) return;
  throw ShapeProblem("equal shapes", shape_to_string(a) + " and " + shape_to_string(b));
}

void check_same_dtype(const BlockTensor& a, const BlockTensor& b) {
  if (a.dtype == b.dtype) return;
  throw ShapeProblem("equal dtypes",
                     std::string(dtype_name(a.dtype)) + " and " + std::string(dtype_name(b.dtype)));
}

void check_numel(const BlockTensor& tensor) {
  if (checked_numel(tensor.shape)) return;
  throw ShapeProblem("fewer than 2^63 elements", shape_to_string(tensor.shape));
}

/// Returns the part of a block with the positions `[begin, end)` of a dimension.
Block narrowed(const Block& block, std::size_t dim, std::int64_t begin, std::int64_t end) {
  Block part = block;
  part.offset += (begin - block.box.offsets[dim]) * block.strides[dim];
  part.box.offsets[dim] = begin;
  part.box.sizes[dim] = end - begin;
  return part;
}

/// Merges the dimensions `dim` and `dim + 1` of a block into one, and appends the result to `out`.
/// `inner`: the tensor's size of dimension `dim + 1`. If the result is not one block, appends one
/// block for each position of `dim`.
void merge_two(Block block, std::size_t dim, std::int64_t inner, std::vector<Block>& out) {
  const std::int64_t outer_size = block.box.sizes[dim];
  const std::int64_t inner_size = block.box.sizes[dim + 1];
  const std::int64_t outer_stride = block.strides[dim];
  const std::int64_t inner_stride = block.strides[dim + 1];
  const bool spans_rows = inner_size == inner;
  const bool chains = inner == 1 || outer_stride == inner_stride * inner;
  if (outer_size != 1 && !(spans_rows && chains)) {
    for (std::int64_t row = 0; row < outer_size; ++row) {
      const std::int64_t at = block.box.offsets[dim] + row;
      merge_two(narrowed(block, dim, at, at + 1), dim, inner, out);
    }
    return;
  }
  const std::int64_t begin = block.box.offsets[dim] * inner + block.box.offsets[dim + 1];
  const std::int64_t merged_size = outer_size * inner_size;
  const std::int64_t stride = inner_size == 1 && outer_size != 1 ? outer_stride : inner_stride;
  block.box.offsets = replaced(block.box.offsets, dim, 2, std::span(&begin, 1));
  block.box.sizes = replaced(block.box.sizes, dim, 2, std::span(&merged_size, 1));
  block.strides = replaced(block.strides, dim, 2, std::span(&stride, 1));
  out.push_back(std::move(block));
  check_num_blocks(out.size());
}

/// Replaces the dimension `dim` of a block by several dimensions of the given sizes. Appends the
/// resulting blocks to `out`.
void unflatten_block(const Block& block, std::size_t dim, std::span<const std::int64_t> sizes,
                     std::vector<Block>& out) {
  const std::int64_t begin = block.box.offsets[dim];
  const Shape steps = row_major_strides(sizes);
  for (const Box& part : boxes_of(FlatRange{begin, begin + block.box.sizes[dim]}, sizes)) {
    Block made = block;
    std::int64_t first = 0;
    Shape strides;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      first += part.offsets[d] * steps[d];
      strides.push_back(part.sizes[d] == 1 ? 0 : steps[d] * block.strides[dim]);
    }
    made.offset += (first - begin) * block.strides[dim];
    made.box.offsets = replaced(block.box.offsets, dim, 1, part.offsets);
    made.box.sizes = replaced(block.box.sizes, dim, 1, part.sizes);
    made.strides = replaced(block.strides, dim, 1, strides);
    out.push_back(std::move(made));
    check_num_blocks(out.size());
  }
}

}  // namespace

BlockTensor whole_tensor_of(std::uint32_t source, DType dtype, const Shape& shape) {
  BlockTensor tensor{dtype, shape, {}};
  if (numel_of(shape) == 0) return tensor;
  tensor.blocks.push_back({whole_box(shape), source, 0, row_major_strides(shape), 0});
  return tensor;
}

BlockTensor constant_tensor(DType dtype, const Shape& shape, double value) {
  BlockTensor tensor{dtype, shape, {}};
  check_numel(tensor);
  if (numel_of(shape) == 0) return tensor;
  tensor.blocks.push_back({whole_box(shape), kConstant, 0, Shape(shape.size()), value});
  return tensor;
}

std::size_t dim_of(std::int64_t dim, std::size_t num_dims) {
  const auto count = static_cast<std::int64_t>(num_dims);
  if (dim < -count || dim >= count) {
    throw ShapeProblem(
        "a dimension in [" + std::to_string(-count) + ", " + std::to_string(count) + ")",
        std::to_string(dim));
  }
  return static_cast<std::size_t>(dim < 0 ? dim + count : dim);
}

std::vector<BlockTensor> cut(const BlockTensor& tensor, std::size_t dim,
                             std::span<const std::int64_t> sizes) {
  std::vector<BlockTensor> parts;
  std::vector<std::int64_t> ends;
  for (const std::int64_t size : sizes) {
    TESSERA_CHECK(size >= 0);
    BlockTensor& part = parts.emplace_back(tensor.dtype, tensor.shape, std::vector<Block>());
    part.shape[dim] = size;
    ends.push_back((ends.empty() ? 0 : ends.back()) + size);
  }
  TESSERA_CHECK(!ends.empty() && ends.back() == tensor.shape[dim]);
  for (const Block& block : tensor.blocks) {
    const std::int64_t block_end = block.box.offsets[dim] + block.box.sizes[dim];
    for (std::int64_t at = block.box.offsets[dim]; at < block_end;) {
      const auto part = static_cast<std::size_t>(std::ranges::upper_bound(ends, at) - ends.begin());
      const std::int64_t begin = ends[part] - sizes[part];
      const std::int64_t end = std::min(block_end, ends[part]);
      Block& made = parts[part].blocks.emplace_back(narrowed(block, dim, at, end));
      made.box.offsets[dim] -= begin;
      at = end;
    }
  }
  return parts;
}

std::vector<BlockTensor> cut_slices(const BlockTensor& tensor, std::size_t dim) {
  if (tensor.shape[dim] > static_cast<std::int64_t>(kMaxBlocks)) {
    throw ShapeProblem("at most " + std::to_string(kMaxBlocks) + " tensors",
                       std::to_string(tensor.shape[dim]));
  }
  std::vector<BlockTensor> slices(static_cast<std::size_t>(tensor.shape[dim]),
                                  {tensor.dtype, without(tensor.shape, dim), {}});
  for (const Block& block : tensor.blocks) {
    for (std::int64_t i = 0; i < block.box.sizes[dim]; ++i) {
      const std::int64_t at = block.box.offsets[dim] + i;
      Block made = narrowed(block, dim, at, at + 1);
      made.box = {without(made.box.offsets, dim), without(made.box.sizes, dim)};
      made.strides = without(made.strides, dim);
      slices[static_cast<std::size_t>(at)].blocks.push_back(std::move(made));
    }
  }
  return slices;
}

BlockTensor concat(std::vector<BlockTensor> tensors, std::size_t dim) {
  BlockTensor result = std::move(tensors.front());
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    check_same_dtype(result, tensors[i]);
    Shape expected = result.shape;
    if (tensors[i].shape.size() > dim) expected[dim] = tensors[i].shape[dim];
    check_same_shape(expected, tensors[i].shape);
    check_num_blocks(result.blocks.size() + tensors[i].blocks.size());
    for (Block& block : tensors[i].blocks) {
      block.box.offsets[dim] = checked_sum(block.box.offsets[dim], result.shape[dim]);
      result.blocks.push_back(std::move(block));
    }
    result.shape[dim] = checked_sum(result.shape[dim], tensors[i].shape[dim]);
  }
  check_numel(result);
  return result;
}

BlockTensor stack(std::vector<BlockTensor> tensors, std::size_t dim) {
  const auto num_tensors = static_cast<std::int64_t>(tensors.size());
  BlockTensor result{tensors.front().dtype, with(tensors.front().shape, dim, num_tensors), {}};
  check_num_dims(result.shape.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check_same_dtype(result, tensors[i]);
    check_same_shape(without(result.shape, dim), tensors[i].shape);
    check_num_blocks(result.blocks.size() + tensors[i].blocks.size());
    for (Block& block : tensors[i].blocks) {
      block.box = {with(block.box.offsets, dim, static_cast<std::int64_t>(i)),
                   with(block.box.sizes, dim, 1)};
      block.strides = with(block.strides, dim, 0);
      result.blocks.push_back(std::move(block));
    }
  }
  check_numel(result);
  return result;
}

BlockTensor permute(BlockTensor tensor, std::span<const std::size_t> order) {
  const auto permuted = [&](const Shape& sizes) {
    Shape result;
    for (const std::size_t d : order) result.push_back(sizes[d]);
    return result;
  };
  tensor.shape = permuted(tensor.shape);
  for (Block& block : tensor.blocks) {
    block.box = {permuted(block.box.offsets), permuted(block.box.sizes)};
    block.strides = permuted(block.strides);
  }
  return tensor;
}

BlockTensor unflatten(BlockTensor tensor, std::size_t dim, std::span<const std::int64_t> sizes) {
  BlockTensor result{tensor.dtype, replaced(tensor.shape, dim, 1, sizes), {}};
  check_num_dims(result.shape.size());
  check_numel(result);
  for (const Block& block : tensor.blocks) unflatten_block(block, dim, sizes, result.blocks);
  return result;
}

BlockTensor flatten(BlockTensor tensor, std::size_t dim, std::size_t num_dims) {
  if (num_dims == 0) {  // no dimensions to merge: adds one of size 1
    const std::int64_t one = 1;
    const std::int64_t zero = 0;
    tensor.shape = replaced(tensor.shape, dim, 0, std::span(&one, 1));
    for (Block& block : tensor.blocks) {
      block.box = {replaced(block.box.offsets, dim, 0, std::span(&zero, 1)),
                   replaced(block.box.sizes, dim, 0, std::span(&one, 1))};
      block.strides = replaced(block.strides, dim, 0, std::span(&zero, 1));
    }
    return tensor;
  }
  for (; num_dims > 1; --num_dims) {
    const std::size_t inner = dim + num_dims - 1;
    const std::int64_t inner_size = tensor.shape[inner];
    const std::int64_t merged = tensor.shape[inner - 1] * inner_size;
    std::vector<Block> blocks;
    for (Block& block : tensor.blocks) merge_two(std::move(block), inner - 1, inner_size, blocks);
    tensor.shape = replaced(tensor.shape, inner - 1, 2, std::span(&merged, 1));
    tensor.blocks = std::move(blocks);
  }
  return tensor;
}

BlockTensor reshape(BlockTensor tensor, const Shape& shape) {
  check_num_dims(shape.size());
  const auto numel = checked_numel(shape);
  if (!numel || *numel != numel_of(tensor.shape)) {
    throw ShapeProblem("a shape of " + std::to_string(numel_of(tensor.shape)) + " elements, as " +
                           shape_to_string(tensor.shape) + " has",
                       shape_to_string(shape));
  }
  if (*numel == 0) return {tensor.dtype, shape, {}};
  // Goes through both shapes together. In each step, takes from both the fewest dimensions that
  // have the same product.
  std::size_t at = 0;  // next dimension of `tensor`; earlier ones have their final form
  for (std::size_t next = 0; next < shape.size() || at < tensor.shape.size();) {
    std::size_t old_count = 0;
    std::size_t new_count = 0;
    std::int64_t old_numel = 1;
    std::int64_t new_numel = 1;
    if (at < tensor.shape.size()) old_numel = tensor.shape[at + old_count++];
    if (next < shape.size()) new_numel = shape[next + new_count++];
    while (old_numel != new_numel) {
      if (old_numel < new_numel) {
        old_numel *= tensor.shape[at + old_count++];
      } else {
        new_numel *= shape[next + new_count++];
      }
    }
    const Shape inner(shape.begin() + next, shape.begin() + next + new_count);
    if (old_count != 1) tensor = flatten(std::move(tensor), at, old_count);
    if (new_count != 1) tensor = unflatten(std::move(tensor), at, inner);
    at += new_count;
    next += new_count;
  }
  return tensor;
}

bool is_whole(const BlockTensor& tensor, std::uint32_t source, const Shape& shape) {
  if (tensor.shape != shape) return false;
  const Shape strides = row_major_strides(shape);
  return std::ranges::all_of(tensor.blocks, [&](const Block& block) {
    if (block.source != source || block.added != 0) return false;
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (block.box.sizes[d] != 1 && block.strides[d] != strides[d]) return false;
      offset += block.box.offsets[d] * strides[d];
    }
    return block.offset == offset;
  });
}

bool have_same_blocks(const BlockTensor& a, const BlockTensor& b) {
  if (a.shape != b.shape || a.dtype != b.dtype || a.blocks.size() != b.blocks.size()) return false;
  const auto key_of = [](const Block& block) {
    Shape strides;
    for (std::size_t d = 0; d < block.strides.size(); ++d) {
      strides.push_back(block.box.sizes[d] == 1 ? 0 : block.strides[d]);
    }
    return std::tuple(block.box, block.source, block.offset, strides, block.added);
  };
  using Key = decltype(key_of(a.blocks.front()));
  std::vector<Key> keys_a;
  std::vector<Key> keys_b;
  for (const Block& block : a.blocks) keys_a.push_back(key_of(block));
  for (const Block& block : b.blocks) keys_b.push_back(key_of(block));
  std::ranges::sort(keys_a, [](const Key& x, const Key& y) { return x < y; });
  std::ranges::sort(keys_b, [](const Key& x, const Key& y) { return x < y; });
  return keys_a == keys_b;
}

}  // namespace tessera::recipe
