#pragma once

#include <string_view>
#include <variant>

namespace tessera::embedding {

// Optimizers that step during the backward: a table gets no `.grad`, and rows that the batch does
// not look up do not change. `w` is the row. `g` is the row's gradient: summed over all ids of the
// batch that look up the row, and clipped to [-max_gradient, max_gradient] (0: not clipped). The
// formulas are computed in float32, whatever the table's dtype. They are those of fbgemm's split
// embedding optimizers (github.com/pytorch/FBGEMM), but here `max_gradient` clips the summed
// gradient g.

/// Stochastic gradient descent, without momentum.
/// - `g += weight_decay * w`
/// - `w -= lr * g`
struct Sgd {
  double lr = 0.01;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// Keeps a sum of squared gradients for each element.
/// - `g += weight_decay * w`
/// - `sum += g * g`
/// - `w -= lr * g / (sqrt(sum) + eps)`
struct Adagrad {
  double lr = 0.01;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// As Adagrad, but with one sum per row. The mean is over the whole row, also if the table is cut
/// by columns.
/// - `g += weight_decay * w`
/// - `row_sum += mean(g * g)`
/// - `w -= lr * g / (sqrt(row_sum) + eps)`
struct RowWiseAdagrad {
  double lr = 0.01;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// Updates only the rows that the batch looks up. `t`: the number of steps of the table, from 1.
/// - `m = beta1 * m + (1 - beta1) * g`
/// - `v = beta2 * v + (1 - beta2) * g * g`
/// - `w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w)`
struct Adam {
  double lr = 0.001;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// As Adam, but with one `v` per row. The mean is over the whole row.
/// - `v = beta2 * v + (1 - beta2) * mean(g * g)`
struct RowWiseAdam {
  double lr = 0.001;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// An optimizer. Names of its state in state dicts: Adagrad `sum`, RowWiseAdagrad `row_sum`, Adam
/// `exp_avg`, `exp_avg_sq`, `step`, RowWiseAdam `exp_avg`, `row_exp_avg_sq`, `step`.
using FusedOptimizer = std::variant<Sgd, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam>;

/// Returns `sgd`, `adagrad`, `row_wise_adagrad`, `adam` or `row_wise_adam`.
std::string_view name_of(const FusedOptimizer& optimizer);

}  // namespace tessera::embedding
