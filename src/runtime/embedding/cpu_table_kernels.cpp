#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>

#include "embedding_kernels/fused_update.h"
#include "embedding_kernels/pooled.h"
#include "embedding_kernels/touched_rows.h"
#include "runtime/embedding/table_kernels.h"
#include "runtime/embedding/table_views.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

class CpuTableBackward final : public TableBackward {
 public:
  CpuTableBackward(std::vector<TableTensors> tables, const TouchedRows& touched,
                   OutputGradient gradient)
      : tables_(std::move(tables)),
        touched_(touched),
        gradient_(std::move(gradient)),
        view_(view_of(gradient_)) {}

  void fused_update(std::span<const int> tables, const FusedOptimizer& optimizer) override {
    std::vector<TableUpdate> updates;
    for (const int table : tables) updates.push_back(update_of(table, optimizer));
    embedding::fused_update(updates, touched_, view_, at::get_num_threads());
  }

  RowGradients row_gradients(int table, const FusedOptimizer& optimizer) override {
    const std::int64_t num_rows = touched_[table].num_rows();
    RowGradients gradients{torch::empty({num_rows, dim_of(table)}, at::kFloat),
                           torch::empty({num_rows}, at::kFloat)};
    embedding::row_gradients(update_of(table, optimizer), touched_, view_,
                             gradients.rows.mutable_data_ptr<float>(),
                             gradients.squares.mutable_data_ptr<float>(), at::get_num_threads());
    return gradients;
  }

  void apply_row_gradients(int table, const FusedOptimizer& optimizer,
                           const RowGradients& gradients, std::int64_t row_width) override {
    embedding::apply_row_gradients(
        update_of(table, optimizer), touched_, gradients.rows.const_data_ptr<float>(),
        gradients.squares.const_data_ptr<float>(), row_width, at::get_num_threads());
  }

  Tensor dense_gradient(int table) override {
    Tensor dense =
        torch::zeros(tables_[static_cast<std::size_t>(table)].weight.sizes(), at::kFloat);
    add_dense_gradient(touched_, table, dim_of(table), view_, dense.mutable_data_ptr<float>(),
                       at::get_num_threads());
    return dense;
  }

  Tensor touched_rows(int table) override {
    const auto rows = touched_[table].rows;
    Tensor copy = torch::empty({static_cast<std::int64_t>(rows.size())}, at::kLong);
    std::ranges::copy(rows, copy.mutable_data_ptr<std::int64_t>());
    return copy;
  }

 private:
  TableUpdate update_of(int table, const FusedOptimizer& optimizer) const {
    return embedding::update_of(tables_[static_cast<std::size_t>(table)], table, optimizer);
  }
  std::int64_t dim_of(int table) const {
    return tables_[static_cast<std::size_t>(table)].weight.size(1);
  }

  std::vector<TableTensors> tables_;
  const TouchedRows& touched_;
  OutputGradient gradient_;
  PooledGradient view_;
};

class CpuTableKernels final : public TableKernels {
 public:
  void pooled(std::span<const TableTensors> tables, const FeatureBags& bags, Tensor& to) override {
    pooled_sums(views_of(tables), view_of(bags), to.mutable_data_ptr<float>(), to.size(1),
                at::get_num_threads());
  }

  Tensor sample_weight_gradients(std::span<const TableTensors> tables, const FeatureBags& bags,
                                 const OutputGradient& gradient) override {
    Tensor result = torch::zeros({bags.ids.numel()}, at::kFloat);
    embedding::sample_weight_gradients(views_of(tables), view_of(bags), view_of(gradient),
                                       result.mutable_data_ptr<float>(), at::get_num_threads());
    return result;
  }

  std::unique_ptr<TableBackward> backward(std::vector<TableTensors> tables, const FeatureBags& bags,
                                          const OutputGradient& gradient) override {
    touched_.assign(views_of(tables), view_of(bags), at::get_num_threads());
    return std::make_unique<CpuTableBackward>(std::move(tables), touched_, gradient);
  }

 private:
  TouchedRows touched_;  // reuses the memory of earlier batches
};

}  // namespace

std::unique_ptr<TableKernels> cpu_table_kernels() {
  return std::make_unique<CpuTableKernels>();
}

}  // namespace tessera::embedding
