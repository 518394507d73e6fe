#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "embedding_kernels/bags.h"
#include "embedding_kernels/fused_update.h"
#include "embedding_kernels/touched_rows.h"
#include "runtime/embedding/fused_state.h"
#include "runtime/embedding/input_exchange.h"
#include "tessera/layout/strategy.h"
#include "tessera/layout/table_plan.h"
#include "tessera/runtime/embedding/shard.h"

namespace tessera::embedding {

/// This rank's shard of a table.
struct LocalTable {
  std::size_t table = 0;
  std::string name;
  Kernel kernel = Kernel::dense;
  TableRule rule;
  std::vector<Shard> layout;     // of all ranks
  Box region;                    // in the whole table; no rows if this rank holds nothing
  std::int64_t num_columns = 0;  // of the whole table
  at::Tensor weight;             // the parameter; has the region's shape
  at::ScalarType dtype = at::kFloat;
  FusedState state;  // of a fused table
  /// Ranks that hold columns of the same rows, including this one, in order of columns.
  std::vector<int> column_peers;

  bool is_replicated() const { return rule.sharding == TableSharding::data_parallel; }
  bool is_empty() const { return region.numel() == 0; }
};

/// Where the columns of each output are within a sample's row of pooled values.
struct PooledColumns {
  std::vector<std::int64_t> first;  // for each output of each assignment, in order
  std::int64_t width = 0;           // of a sample's row
};

/// Looks up tables together: pools rows in the forward; in the backward, computes gradients of
/// dense tables and updates fused ones. Refers to the tables, which must not move.
class Lookup {
 public:
  Lookup() = default;
  /// `tables`: all tables of the collection. `assignments`: the shards to look up here, whose
  /// pooled rows go to `columns`.
  Lookup(const std::vector<Assignment>& assignments, PooledColumns columns,
         std::vector<LocalTable>& tables, std::shared_ptr<dist::Group> group);

  std::int64_t width() const { return columns_.width; }

  /// Pools the rows of each bag and writes the results to their columns of `to`. Shape: `to` is
  /// `[num_samples, width]`, float32.
  void pooled(const LocalBags& bags, at::Tensor& to) const;
  /// Returns the gradient of `bags.weights`. Shape: `gradient` is `[num_samples, width]`.
  at::Tensor sample_weight_gradients(const LocalBags& bags, const at::Tensor& gradient) const;
  /// Updates the fused tables, and sets `gradients[table]` of the dense tables. All gradients are
  /// averages over the group. For shards: ranks with columns of the same rows exchange sums of
  /// squared gradients, in one all-to-all if there are such tables. For replicas: ranks exchange
  /// gradients, in an all-reduce for each dense table, and one all-gather and two all-to-alls for
  /// each fused table. Collective.
  void backward(const LocalBags& bags, const at::Tensor& gradient, const FusedOptimizer* optimizer,
                std::vector<at::Tensor>& gradients);

 private:
  std::vector<TableView> views() const;
  Bags view(const LocalBags& bags) const;
  TableUpdate update_of(std::size_t looked, const FusedOptimizer& optimizer) const;
  void add_dense(std::size_t looked, const PooledGradient& gradient,
                 std::vector<at::Tensor>& gradients);
  void step_shards(const PooledGradient& gradient, const FusedOptimizer& optimizer);
  void step_split_rows(const PooledGradient& gradient, const FusedOptimizer& optimizer);
  void step_replica(std::size_t looked, const PooledGradient& gradient,
                    const FusedOptimizer& optimizer);

  std::vector<LocalTable*> looked_;  // in order of the assignments
  std::vector<int> table_of_feature_;
  PooledColumns columns_;
  bool splits_rows_ = false;  // whether any rank holds only some columns of a fused table
  std::shared_ptr<dist::Group> group_;
  TouchedRows touched_;
};

/// Returns whether a table is updated during the backward.
bool takes_steps(const LocalTable& table);

}  // namespace tessera::embedding
