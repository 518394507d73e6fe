#pragma once

#include <string_view>
#include <variant>

namespace tessera::embedding {

// Optimizers that step during the backward. The table gets no `.grad`, and only the rows that the
// batch looks up change: their weights and their state. In the formulas, `w` is such a row, and `g`
// is its gradient: summed over all ids of the batch that look up the row; then `max_gradient`, if
// not 0, clips each element to [-max_gradient, max_gradient]. Formulas are computed in float32 for
// any dtype of the table. They are those of fbgemm's split embedding optimizers
// (github.com/pytorch/FBGEMM), except that `max_gradient` clips the sum. All settings must be >= 0.

/// Stochastic gradient descent, without momentum.
/// - `g += weight_decay * w`
/// - `w -= lr * g`
struct Sgd {
  double lr = 0.01;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// Keeps, as `sum`, the sum of squared gradients of each element.
/// - `g += weight_decay * w`
/// - `sum += g * g`
/// - `w -= lr * g / (sqrt(sum) + eps)`
struct Adagrad {
  double lr = 0.01;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// As Adagrad, but with one sum per row. The mean is over all columns of the row, also if the table
/// is cut by columns and each rank holds only some of them.
/// - `g += weight_decay * w`
/// - `row_sum += mean(g * g)`
/// - `w -= lr * g / (sqrt(row_sum) + eps)`
struct RowWiseAdagrad {
  double lr = 0.01;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// Adam with decoupled weight decay. `t`: the number of this step of the table, from 1.
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

/// As Adam, but with one `v` per row. The mean is over all columns of the row.
/// - `v = beta2 * v + (1 - beta2) * mean(g * g)`
struct RowWiseAdam {
  double lr = 0.001;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// An optimizer. In state dicts, `m` is `exp_avg`, `v` is `exp_avg_sq` (RowWiseAdam:
/// `row_exp_avg_sq`), `t` is `step`; `sum` and `row_sum` keep their names. Sgd has no state.
using FusedOptimizer = std::variant<Sgd, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam>;

/// Returns the optimizer's name: `sgd`, `adagrad`, `row_wise_adagrad`, `adam` or `row_wise_adam`.
std::string_view name_of(const FusedOptimizer& optimizer);

}  // namespace tessera::embedding
