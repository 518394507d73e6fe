#pragma once

#include <cstdint>
#include <span>

#include "embedding_kernels/bags.h"
#include "embedding_kernels/touched_rows.h"
#include "tessera/runtime/embedding/fused_optimizer.h"

namespace tessera::embedding {

/// The state of one table's optimizer, seen where it lies: float32, null what the optimizer (see
/// fused_optimizer.h) does not have.
struct OptimizerState {
  float* sum = nullptr;             // Adagrad: [rows, dim]
  float* row_sum = nullptr;         // RowWiseAdagrad: [rows]
  float* exp_avg = nullptr;         // Adam, RowWiseAdam: [rows, dim]
  float* exp_avg_sq = nullptr;      // Adam: [rows, dim]
  float* row_exp_avg_sq = nullptr;  // RowWiseAdam: [rows]
  std::int64_t step = 0;            // Adam, RowWiseAdam: of this update, 1 for the table's first
};

/// One table and how it is updated.
struct TableUpdate {
  int table;  // its number among those whose touched rows were found
  TableView view;
  FusedOptimizer optimizer;
  OptimizerState state;
};

// [Note: Update of a row]
//   g = scale * sum of weight * gradient of the bag   in the order of [Note: Order of sums]
//   g = clamp(g, -max_gradient, max_gradient)         element by element, where it is not 0; NaN
//   stays g = g + weight_decay * w                          Sgd, Adagrad and RowWiseAdagrad
// and then what fused_optimizer.h says of the optimizer, all in float32. The new weights are
// rounded to the nearest of the table's dtype, ties to even. Rows that are not touched are neither
// read nor written. All functions give the same bits for any number of threads, and the two phases
// the same as `fused_update` where a table is not cut by columns.

/// Updates the touched rows of tables, one pass over each row.
void fused_update(std::span<const TableUpdate> updates, const TouchedRows& touched,
                  const PooledGradient& gradient, int num_threads);

/// Says whether an optimizer looks at g of the whole row at once. A table of it that is cut by
/// columns is updated in two phases, between which its ranks add up their `squares`.
bool is_row_wise(const FusedOptimizer& optimizer);

/// Phase one: writes g of each touched row, and the sum of its g^2 over the columns held here.
/// Shape: `gradients` is `[touched rows, dim]`, `squares` is `[touched rows]`.
void row_gradients(const TableUpdate& update, const TouchedRows& touched,
                   const PooledGradient& gradient, float* gradients, float* squares,
                   int num_threads);

/// Phase two: updates each touched row by its g, with the sum of g^2 over the `row_width` columns
/// of the whole row.
void apply_row_gradients(const TableUpdate& update, const TouchedRows& touched,
                         const float* gradients, const float* squares, std::int64_t row_width,
                         int num_threads);

/// Adds scale * (sum of weight * gradient of the bag) of each touched row of a table to its row of
/// `out`: the gradient that a table has without a fused optimizer.
/// Shape: `out` is `[rows, dim]`, float32.
void add_dense_gradient(const TouchedRows& touched, int table, std::int64_t dim,
                        const PooledGradient& gradient, float* out, int num_threads);

}  // namespace tessera::embedding
