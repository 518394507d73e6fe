#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::embedding {

/// Columns of the output, and the same columns in a rank's pooled rows.
struct Block {
  std::int64_t from = 0;  // in the pooled rows
  std::int64_t to = 0;    // in the output
  std::int64_t width = 0;
  bool is_first = false;  // the first block that writes there; later blocks add to it
};

/// What one rank pools.
struct RankBlocks {
  std::vector<Block> blocks;
  std::int64_t width = 0;  // of a sample's pooled row
};

/// Writes to `output` the sum of what all ranks pooled for its samples, in order of rank. Shape:
/// `pooled` has each rank's `[batch_size, width]`, one after the other.
void sum_pooled(std::span<const RankBlocks> ranks, const at::Tensor& pooled, at::Tensor& output);

/// Returns the gradient of what each rank pooled. Shape: as `pooled` above.
at::Tensor cut_gradient(std::span<const RankBlocks> ranks, const at::Tensor& gradient);

}  // namespace tessera::embedding
