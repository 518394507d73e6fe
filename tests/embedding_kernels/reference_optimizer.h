#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "embedding_kernels/batches.h"
#include "tessera/embedding_kernels/fused_optimizer.h"

namespace tessera::embedding::test {

using RowGradients = std::map<std::int64_t, std::vector<double>>;  // by row, of dim elements

/// Sums the gradient of each row of a table that a batch names, in float64.
RowGradients summed_gradients(const Batch& batch, int table, std::int64_t dim,
                              const std::vector<float>& gradient, double scale);

/// A table and its optimizer in float64, written down from the definitions.
class ReferenceOptimizer {
 public:
  ReferenceOptimizer(const Table& table, const FusedOptimizer& optimizer);

  /// Makes one step. The weights are rounded to the table's dtype.
  void step(const RowGradients& gradients);

  const std::vector<double>& weights() const { return weights_; }
  const std::vector<double>& sum() const { return sum_; }
  const std::vector<double>& row_sum() const { return row_sum_; }
  const std::vector<double>& exp_avg() const { return exp_avg_; }
  const std::vector<double>& exp_avg_sq() const { return exp_avg_sq_; }
  const std::vector<double>& row_exp_avg_sq() const { return row_exp_avg_sq_; }

 private:
  void update(const Sgd& sgd, std::int64_t row, const std::vector<double>& g);
  void update(const Adagrad& adagrad, std::int64_t row, const std::vector<double>& g);
  void update(const RowWiseAdagrad& adagrad, std::int64_t row, const std::vector<double>& g);
  void update(const Adam& adam, std::int64_t row, const std::vector<double>& g);
  void update(const RowWiseAdam& adam, std::int64_t row, const std::vector<double>& g);

  std::size_t element(std::int64_t row, std::size_t column) const;

  DType dtype_;
  std::int64_t dim_;
  FusedOptimizer optimizer_;
  std::int64_t num_steps_ = 0;
  std::vector<double> weights_;
  std::vector<double> sum_, exp_avg_, exp_avg_sq_;  // [rows, dim]
  std::vector<double> row_sum_, row_exp_avg_sq_;    // [rows]
};

}  // namespace tessera::embedding::test
