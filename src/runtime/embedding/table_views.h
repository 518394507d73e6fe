#pragma once

#include <vector>

#include "embedding_kernels/bags.h"
#include "embedding_kernels/fused_update.h"
#include "runtime/embedding/table_kernels.h"
#include "runtime/torch_bridge.h"

// Converts tensors to plain pointers for the kernels in src/embedding_kernels, which do not use
// libtorch.

namespace tessera::embedding {

inline TableView view_of(const TableTensors& table) {
  return {table.weight.data_ptr(), dtype_of(table.weight.scalar_type()), table.weight.size(0),
          table.weight.size(1)};
}

inline std::vector<TableView> views_of(std::span<const TableTensors> tables) {
  std::vector<TableView> views;
  for (const TableTensors& table : tables) views.push_back(view_of(table));
  return views;
}

template <class T>
std::span<const T> span_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

inline Bags view_of(const FeatureBags& bags) {
  return {bags.table_of_feature,
          bags.column_of_feature,
          bags.num_samples,
          span_of<std::int64_t>(bags.ids),
          span_of<std::int64_t>(bags.offsets),
          span_of<float>(bags.weights)};
}

inline PooledGradient view_of(const OutputGradient& gradient) {
  return {gradient.rows.const_data_ptr<float>(), gradient.rows.size(1), gradient.scale};
}

inline TableUpdate update_of(const TableTensors& table, int position,
                             const FusedOptimizer& optimizer) {
  const FusedState& state = *table.state;
  return {position,
          view_of(table),
          optimizer,
          {state.data("sum"), state.data("row_sum"), state.data("exp_avg"),
           state.data("exp_avg_sq"), state.data("row_exp_avg_sq"), state.step}};
}

}  // namespace tessera::embedding
