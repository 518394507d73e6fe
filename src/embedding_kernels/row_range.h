#pragma once

#include <cstdint>

#include "embedding_kernels/fused_update.h"

namespace tessera::embedding {

/// The inputs from which the gradients of one table's touched rows (rows that the batch looks up)
/// are computed.
struct TableGradient {
  TouchedRows::OfTable touched;
  std::int64_t dim;
  PooledGradient pooled;
  std::int64_t first_column = 0;  // column of the pooled output at which `pooled` begins
  const float* block_sums;        // the sums of the blocks of hot rows, [blocks, dim]
};

/// How g in [Note: Update of a row] is computed from the sum of a row's gradients.
struct GradientRule {
  float scale = 1;
  float max_gradient = 0;
  float weight_decay = 0;  // 0 if the optimizer does not add it to g
};

/// Consecutive indices into one table's touched rows. A thread takes one such range at a time.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;
};

}  // namespace tessera::embedding
