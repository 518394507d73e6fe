#pragma once

#include <cstdint>

#include "embedding_kernels/fused_update.h"

namespace tessera::embedding {

/// The inputs of the gradient of one table's touched rows.
struct TableGradient {
  TouchedRows::OfTable touched;
  std::int64_t dim;
  PooledGradient pooled;
  std::int64_t first_column = 0;  // column of the pooled output at which `pooled` begins
  const float* block_sums;        // of the hot rows, [blocks, dim]
};

/// How the sum of a row's gradients becomes g, see [Note: Update of a row].
struct GradientRule {
  float scale = 1;
  float max_gradient = 0;
  float weight_decay = 0;  // if it is part of g
};

/// Consecutive touched rows of one table: the work of one thread at a time.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;
};

}  // namespace tessera::embedding
