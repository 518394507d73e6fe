#pragma once

#include <cstdint>
#include <span>

#include "embedding_kernels/bags.h"
#include "embedding_kernels/touched_rows.h"
#include "tessera/embedding_kernels/fused_optimizer.h"

namespace tessera::embedding {

/// A view of one table's optimizer state, float32. State that the optimizer (see fused_optimizer.h)
/// does not have is null.
struct OptimizerState {
  float* sum = nullptr;             // Adagrad: [rows, dim]
  float* row_sum = nullptr;         // RowWiseAdagrad: [rows]
  float* exp_avg = nullptr;         // Adam, RowWiseAdam: [rows, dim]
  float* exp_avg_sq = nullptr;      // Adam: [rows, dim]
  float* row_exp_avg_sq = nullptr;  // RowWiseAdam: [rows]
  std::int64_t step = 0;            // Adam, RowWiseAdam: number of this update, from 1
};

/// A table to update, with its optimizer and state.
struct TableUpdate {
  int table;  // the table's index in `touched`
  TableView view;
  FusedOptimizer optimizer;
  OptimizerState state;
};

// [Note: Update of a row]
//   g = scale * sum of weight * gradient of the bag   in the order of [Note: Order of sums]
//   g = clamp(g, -max_gradient, max_gradient)         if max_gradient is not 0; NaN stays NaN
//   g = g + weight_decay * w                          Sgd, Adagrad and RowWiseAdagrad
// Then the formulas of fused_optimizer.h follow, all in float32. New weights are rounded to the
// nearest value of the table's dtype, ties to even. Rows that are not touched are neither read nor
// written. All functions give the same bits for any number of threads. For a table that is not cut
// by columns, `row_gradients` and then `apply_row_gradients` give the same bits as `fused_update`.

/// Updates the touched rows of tables, in one pass over each row.
void fused_update(std::span<const TableUpdate> updates, const TouchedRows& touched,
                  const PooledGradient& gradient, int num_threads);

/// Returns whether the update of a row needs the gradients of all its columns. If so, a table that
/// is cut by columns is updated in two steps, `row_gradients` and `apply_row_gradients`. Between
/// them the ranks add up their `squares`.
bool is_row_wise(const FusedOptimizer& optimizer);

/// First step: writes g of each touched row, and the sum of g^2 over the columns that this process
/// holds. Shape: `gradients` is `[touched rows, dim]`, `squares` is `[touched rows]`.
void row_gradients(const TableUpdate& update, const TouchedRows& touched,
                   const PooledGradient& gradient, float* gradients, float* squares,
                   int num_threads);

/// Second step: updates each touched row by its g. `squares`: for each touched row, the sum of g^2
/// over all its `row_width` columns, including those of other ranks.
void apply_row_gradients(const TableUpdate& update, const TouchedRows& touched,
                         const float* gradients, const float* squares, std::int64_t row_width,
                         int num_threads);

/// Computes the gradient of a table without fused optimizer: adds scale * (sum of weight * gradient
/// of the bag) of each touched row to that row of `out`. Shape: `out` is `[rows, dim]`, float32.
void add_dense_gradient(const TouchedRows& touched, int table, std::int64_t dim,
                        const PooledGradient& gradient, float* out, int num_threads);

}  // namespace tessera::embedding
