#include "embedding_kernels/reference_optimizer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

namespace tessera::embedding::test {
namespace {

double mean_square(const std::vector<double>& g) {
  return std::inner_product(g.begin(), g.end(), g.begin(), 0.0) / static_cast<double>(g.size());
}

template <class AnyAdam>
double adam_step(const AnyAdam& adam, std::int64_t t, double w, double m, double v) {
  const double corrected_m = m / (1 - std::pow(adam.beta1, static_cast<double>(t)));
  const double corrected_v = v / (1 - std::pow(adam.beta2, static_cast<double>(t)));
  return adam.lr * (corrected_m / (std::sqrt(corrected_v) + adam.eps) + adam.weight_decay * w);
}

}  // namespace

RowGradients summed_gradients(const Batch& batch, int table, std::int64_t dim,
                              const std::vector<float>& gradient, double scale) {
  RowGradients sums;
  batch.for_places([&](std::size_t feature, std::int64_t sample, std::size_t place) {
    if (batch.table_of_feature[feature] != table) return;
    std::vector<double>& sum = sums[batch.ids[place]];
    sum.resize(static_cast<std::size_t>(dim));
    const std::int64_t first = sample * batch.num_columns + batch.column_of_feature[feature];
    for (std::size_t k = 0; k < sum.size(); ++k) {
      sum[k] += scale * static_cast<double>(batch.weight(place)) *
                static_cast<double>(gradient[static_cast<std::size_t>(first) + k]);
    }
  });
  return sums;
}

ReferenceOptimizer::ReferenceOptimizer(const Table& table, const FusedOptimizer& optimizer)
    : dtype_(table.dtype),
      dim_(table.dim),
      optimizer_(optimizer),
      weights_(table.values()),
      sum_(weights_.size()),
      exp_avg_(weights_.size()),
      exp_avg_sq_(weights_.size()),
      row_sum_(static_cast<std::size_t>(table.rows)),
      row_exp_avg_sq_(static_cast<std::size_t>(table.rows)) {}

std::size_t ReferenceOptimizer::element(std::int64_t row, std::size_t column) const {
  return static_cast<std::size_t>(row * dim_) + column;
}

void ReferenceOptimizer::step(const RowGradients& gradients) {
  ++num_steps_;
  std::visit(
      [&]<class Optimizer>(const Optimizer& optimizer) {
        constexpr bool kIsAdam =
            std::is_same_v<Optimizer, Adam> || std::is_same_v<Optimizer, RowWiseAdam>;
        for (const auto& [row, gradient] : gradients) {
          std::vector<double> g = gradient;
          for (std::size_t k = 0; k < g.size(); ++k) {
            if (optimizer.max_gradient > 0) {
              g[k] = std::clamp(g[k], -optimizer.max_gradient, optimizer.max_gradient);
            }
            if (!kIsAdam) g[k] += optimizer.weight_decay * weights_[element(row, k)];
          }
          update(optimizer, row, g);
        }
      },
      optimizer_);
  weights_ = read(dtype_, stored(dtype_, weights_));
}

void ReferenceOptimizer::update(const Sgd& sgd, std::int64_t row, const std::vector<double>& g) {
  for (std::size_t k = 0; k < g.size(); ++k) weights_[element(row, k)] -= sgd.lr * g[k];
}

void ReferenceOptimizer::update(const Adagrad& adagrad, std::int64_t row,
                                const std::vector<double>& g) {
  for (std::size_t k = 0; k < g.size(); ++k) {
    double& sum = sum_[element(row, k)];
    sum += g[k] * g[k];
    weights_[element(row, k)] -= adagrad.lr * g[k] / (std::sqrt(sum) + adagrad.eps);
  }
}

void ReferenceOptimizer::update(const RowWiseAdagrad& adagrad, std::int64_t row,
                                const std::vector<double>& g) {
  double& sum = row_sum_[static_cast<std::size_t>(row)];
  sum += mean_square(g);
  for (std::size_t k = 0; k < g.size(); ++k) {
    weights_[element(row, k)] -= adagrad.lr * g[k] / (std::sqrt(sum) + adagrad.eps);
  }
}

void ReferenceOptimizer::update(const Adam& adam, std::int64_t row, const std::vector<double>& g) {
  for (std::size_t k = 0; k < g.size(); ++k) {
    const std::size_t i = element(row, k);
    exp_avg_[i] = adam.beta1 * exp_avg_[i] + (1 - adam.beta1) * g[k];
    exp_avg_sq_[i] = adam.beta2 * exp_avg_sq_[i] + (1 - adam.beta2) * g[k] * g[k];
    weights_[i] -= adam_step(adam, num_steps_, weights_[i], exp_avg_[i], exp_avg_sq_[i]);
  }
}

void ReferenceOptimizer::update(const RowWiseAdam& adam, std::int64_t row,
                                const std::vector<double>& g) {
  double& v = row_exp_avg_sq_[static_cast<std::size_t>(row)];
  v = adam.beta2 * v + (1 - adam.beta2) * mean_square(g);
  for (std::size_t k = 0; k < g.size(); ++k) {
    const std::size_t i = element(row, k);
    exp_avg_[i] = adam.beta1 * exp_avg_[i] + (1 - adam.beta1) * g[k];
    weights_[i] -= adam_step(adam, num_steps_, weights_[i], exp_avg_[i], v);
  }
}

}  // namespace tessera::embedding::test
