#pragma once

#include <cstdint>

#include "embedding_kernels/fused_update.h"

namespace tessera::embedding {

/// Everything that the gradient of a touched row of one table is summed from.
struct TableGradient {
  TouchedRows::OfTable touched;
  std::int64_t dim;
  PooledGradient pooled;
  std::int64_t first_column = 0;  // of the pooled output, that `pooled` begins with
  const float* block_sums;        // of the hot rows, [blocks, dim]
};

/// What follows the sum, see [Note: Update of a row].
struct GradientRule {
  float scale = 1;
  float max_gradient = 0;
  float weight_decay = 0;  // where it is part of g
};

/// Consecutive touched rows of one table: what one thread updates at a time.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;
};

}  // namespace tessera::embedding
