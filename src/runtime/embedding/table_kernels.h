#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "runtime/embedding/fused_state.h"

namespace tessera::embedding {

/// A table, or one shard of a table, as kernels get it. All tensors are on one device and
/// contiguous.
struct TableTensors {
  at::Tensor weight;                  // [rows, dim]
  const FusedState* state = nullptr;  // of a table with a fused optimizer; else null
};

/// The bags of a batch. Bag `f * num_samples + s` is sample s of feature f. Tensors are on the
/// tables' device, spans in host memory.
struct FeatureBags {
  std::span<const int> table_of_feature;
  /// For each feature: its first column in the pooled output.
  std::span<const std::int64_t> column_of_feature;
  std::int64_t num_samples = 0;
  at::Tensor ids;  // [N] int64, rows of the feature's table
  /// [features * num_samples + 1] int64: bag i has the ids [offsets[i], offsets[i + 1]).
  at::Tensor offsets;
  at::Tensor weights;  // [N] float32; undefined: all 1
  /// The index in `ids` at which each feature begins, and N at the end. Empty on the CPU.
  std::span<const std::int64_t> feature_begins;
};

/// The gradient of a pooled output. Shape: `rows` is `[num_samples, width]`, contiguous, float32.
struct OutputGradient {
  at::Tensor rows;
  float scale = 1;  // the gradients of tables are multiplied by it
};

/// The gradient of each row that a batch looks up, summed over all ids of the row. Each row is
/// listed once or, with the same sum, once for each of its ids. Both tensors are float32.
/// `squares[i]`: the sum of the squares of `rows[i]`.
struct RowGradients {
  at::Tensor rows;     // [n, dim]
  at::Tensor squares;  // [n]
};

/// The backward of one batch: the rows that the batch looks up (touched rows), and their gradients.
/// The argument `table` is an index into the tables that `TableKernels::backward` got. Formulas:
/// see [Note: Update of a row].
class TableBackward {
 public:
  virtual ~TableBackward() = default;

  /// Updates the touched rows of these tables by the optimizer.
  virtual void fused_update(std::span<const int> tables, const FusedOptimizer& optimizer) = 0;
  /// If ranks must combine gradients, call two steps instead of fused_update. The first returns,
  /// for each touched row, the gradient g that the optimizer uses: scaled, clipped, with weight
  /// decay as in the note. `rows` and `squares` are of this rank's columns only. The number of
  /// rows, n, depends only on the ids.
  virtual RowGradients row_gradients(int table, const FusedOptimizer& optimizer) = 0;
  /// The second step updates the touched rows. `gradients.squares`: the caller has added up the
  /// ranks' squares, so that they are sums over all `row_width` columns of a row.
  virtual void apply_row_gradients(int table, const FusedOptimizer& optimizer,
                                   const RowGradients& gradients, std::int64_t row_width) = 0;
  /// Returns the gradient of a whole table. Shape: `[rows, dim]`, float32.
  virtual at::Tensor dense_gradient(int table) = 0;
  /// Returns the touched rows, int64. Depending on the kernels: each row once, ascending; or the
  /// row of each id, in any order.
  virtual at::Tensor touched_rows(int table) = 0;
};

/// Looks up and updates tables on one device. Functions put their work on the current stream and do
/// not wait for the device. Not thread-safe.
class TableKernels {
 public:
  virtual ~TableKernels() = default;

  /// Sums the rows of each bag and writes the sums to their columns of `to`. Shape: `to` is
  /// `[num_samples, width]`, contiguous, float32. An empty bag gives zeros.
  virtual void pooled(std::span<const TableTensors> tables, const FeatureBags& bags,
                      at::Tensor& to) = 0;
  /// Returns the gradient of `bags.weights`. Ignores `gradient.scale`.
  virtual at::Tensor sample_weight_gradients(std::span<const TableTensors> tables,
                                             const FeatureBags& bags,
                                             const OutputGradient& gradient) = 0;
  /// Begins a backward. The result refers to these kernels, and is valid until the next call of
  /// `backward`.
  virtual std::unique_ptr<TableBackward> backward(std::vector<TableTensors> tables,
                                                  const FeatureBags& bags,
                                                  const OutputGradient& gradient) = 0;
};

/// Returns Tessera's own kernels for the CPU.
std::unique_ptr<TableKernels> cpu_table_kernels();
/// Returns kernels of ATen operators, for any device; they need `feature_begins` on the CPU too. No
/// call waits for the device. A row's gradients are summed by `add_rows`.
std::unique_ptr<TableKernels> aten_table_kernels();

/// Adds each of `rows` to the row of `to` that `places` (int64, on the device) names. Sums are the
/// same in every run. On a GPU, those of `index_add_` are not: its atomic additions have no order.
void add_rows(const at::Tensor& to, const at::Tensor& places, const at::Tensor& rows);

using MakeTableKernels = std::function<std::unique_ptr<TableKernels>()>;
/// Sets the function that makes the kernels for a type of device. Thread-safe.
void register_table_kernels(at::DeviceType type, MakeTableKernels make);
/// Returns the kernels that are registered for the device's type. If none are registered, returns
/// Tessera's own on the CPU, and ATen's elsewhere. Thread-safe.
std::unique_ptr<TableKernels> table_kernels_for(at::Device device);

/// Updates the rows of a table for which `is_touched` is true. `gradient` is the gradient of the
/// whole table, scaled already. Shape: `gradient` `[rows, dim]`, float32; `is_touched` `[rows]`,
/// bool.
void masked_update(const TableTensors& table, const FusedOptimizer& optimizer, at::Tensor gradient,
                   const at::Tensor& is_touched);

}  // namespace tessera::embedding
