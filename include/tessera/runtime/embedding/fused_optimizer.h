#pragma once

#include <string_view>
#include <variant>

namespace tessera::embedding {

// Optimizers whose step is part of the backward: a table's gradient is never stored, and rows that
// a batch does not name are neither read nor written. g is the gradient of a row, summed over all
// places that name it, clipped by value to [-max_gradient, max_gradient] (0: not clipped); w the
// row, both computed in float32 whatever the table's dtype. Definitions are those of fbgemm's split
// embedding optimizers (github.com/pytorch/FBGEMM), but for `max_gradient`, which acts on g here.

/// g += weight_decay * w;  w -= lr * g
struct Sgd {
  double lr = 0.01;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// g += weight_decay * w;  sum += g * g;  w -= lr * g / (sqrt(sum) + eps)
struct Adagrad {
  double lr = 0.01;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// One sum per row: g += weight_decay * w;  row_sum += mean(g * g) over the whole row, however the
/// table is cut;  w -= lr * g / (sqrt(row_sum) + eps)
struct RowWiseAdagrad {
  double lr = 0.01;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// Of the rows that a batch names alone; t counts the table's steps. m = beta1 * m + (1 - beta1) *
/// g;  v = beta2 * v + (1 - beta2) * g * g;  w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 -
/// beta2^t)) + eps) + weight_decay * w)
struct Adam {
  double lr = 0.001;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// As Adam, with one v per row, of mean(g * g) over the whole row.
struct RowWiseAdam {
  double lr = 0.001;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_gradient = 0;
};

/// State, by the names it has in optimizer state dicts: Adagrad `sum`, RowWiseAdagrad `row_sum`,
/// Adam `exp_avg`, `exp_avg_sq`, `step`, RowWiseAdam `exp_avg`, `row_exp_avg_sq`, `step`.
using FusedOptimizer = std::variant<Sgd, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam>;

/// Returns `sgd`, `adagrad`, `row_wise_adagrad`, `adam` or `row_wise_adam`.
std::string_view name_of(const FusedOptimizer& optimizer);

}  // namespace tessera::embedding
