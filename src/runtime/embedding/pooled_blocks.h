#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::embedding {

/// A block of columns that a rank pools: where the columns are in its pooled rows, and where they
/// go in the output.
struct Block {
  std::int64_t from = 0;  // first column in the pooled rows
  std::int64_t to = 0;    // first column in the output
  std::int64_t width = 0;
  bool is_first = false;  // writes its columns; later blocks with the same columns add to them
};

/// All columns that one rank pools.
struct RankBlocks {
  std::vector<Block> blocks;
  std::int64_t width = 0;  // columns of a sample's pooled row
};

/// Adds up the pooled rows of all ranks, in rank order, and writes the sums to their columns of
/// `output`. Shape: `pooled` has each rank's `[batch_size, width]`, one after the other.
void sum_pooled(std::span<const RankBlocks> ranks, const at::Tensor& pooled, at::Tensor& output);

/// Returns the gradient of each rank's pooled rows: its columns of `gradient`. Shape: as `pooled`
/// of sum_pooled.
at::Tensor cut_gradient(std::span<const RankBlocks> ranks, const at::Tensor& gradient);

}  // namespace tessera::embedding
