#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "runtime/embedding/fused_state.h"
#include "runtime/embedding/input.h"
#include "runtime/embedding/row_cache.h"
#include "runtime/embedding/table_kernels.h"
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
  std::vector<Shard> layout;     // the shards of all ranks
  Box region;                    // this rank's part of the table; no rows if it holds nothing
  std::int64_t num_columns = 0;  // columns of the whole table
  at::Tensor weight;             // the parameter; has the region's shape
  at::ScalarType dtype = at::kFloat;
  /// Where the lookup runs. Without a cache, weight and state are there too.
  at::Device device = at::kCPU;
  FusedState state;  // only of a table with a fused optimizer
  /// The ranks (with this one) that hold columns of these rows, by column; empty if replicated.
  std::vector<int> column_peers;
  /// Whether the last backward was asked for the gradient of this table.
  bool is_in_backward = false;
  /// The rows on the device, if the weight and the state are in host memory.
  std::unique_ptr<RowCache> cache{};

  bool is_replicated() const { return rule.sharding == TableSharding::data_parallel; }
  bool is_empty() const { return region.numel() == 0; }
};

/// The position of each output's columns in a sample's row of pooled values.
struct PooledColumns {
  std::vector<std::int64_t> first;  // first column, for each output of each assignment, in order
  std::int64_t width = 0;           // number of columns of a sample's row
};

/// Bags whose rows are on the device. For a cached table, the ids are slots of its cache.
struct ResidentBags {
  LocalBags bags;
  std::vector<std::vector<std::int64_t>> slots;  // one list per cached table
  /// One per cached table: RowCache::generation at the fetch.
  std::vector<std::uint64_t> generations;
};

/// Looks up several tables together. The forward pools rows. The backward computes gradients of
/// dense tables, and updates tables with a fused optimizer. Refers to the tables, which must not
/// move.
class Lookup {
 public:
  Lookup() = default;
  /// `tables`: all tables of the collection. `assignments`: the shards to look up on this rank.
  /// `columns`: where their pooled rows go. `device`: the device of all tables.
  Lookup(const std::vector<Assignment>& assignments, PooledColumns columns,
         std::vector<LocalTable>& tables, std::shared_ptr<dist::Group> group, at::Device device);

  std::int64_t width() const { return columns_.width; }

  /// Pools the rows of each bag and writes the results to their columns of `to`. Shape: `to` is
  /// `[num_samples, width]`, float32.
  void pooled(const LocalBags& bags, at::Tensor& to) const;
  /// Returns the gradient of `bags.weights`. Shape: `gradient` is `[num_samples, width]`.
  at::Tensor sample_weight_gradients(const LocalBags& bags, const at::Tensor& gradient) const;
  /// Updates the fused tables, and sets `gradients[table]` of the dense tables. All gradients are
  /// averages over the group. Collective: if a row-wise optimizer updates tables that are cut by
  /// columns, one all-to-all of sums of squared gradients. For each replicated table that is
  /// trained: one all-reduce of its gradient if it is dense or on a device; one all-gather and two
  /// all-to-alls if it is fused and on the CPU.
  void backward(const LocalBags& bags, const at::Tensor& gradient, const FusedOptimizer* optimizer,
                std::vector<at::Tensor>& gradients);

  // For tables whose rows are cached on the device: the other tables do not need these functions.

  bool has_caches() const;
  /// Throws as RowCache::check_room.
  void check_room(const LocalBags& bags) const;
  /// Brings the rows of a batch to the device, and returns the bags with slots in place of the ids
  /// of cached tables. Requires: `check_room` has accepted the bags.
  ResidentBags fetch(const LocalBags& bags);
  /// If any cached row has lost its slot since `fetch`, brings the rows of this batch to the device
  /// again. Their slots may change.
  void keep(ResidentBags& resident, const LocalBags& bags);
  /// Call it when a backward changes the rows, so that the cache writes them back later.
  void mark_changed(const ResidentBags& resident);

 private:
  template <class Visit>
  void for_cached(const LocalBags& bags, const Visit& visit) const;
  struct SplitTable {  // a table whose columns are on several ranks
    std::size_t looked;
    RowGradients gradients;           // for this rank's columns
    std::vector<at::Tensor> squares;  // for each peer's columns, in the peers' order
  };
  std::vector<TableTensors> tensors() const;
  FeatureBags view(const LocalBags& bags) const;
  void add_dense(std::size_t looked, TableBackward& backward, std::vector<at::Tensor>& gradients);
  void step_shards(TableBackward& backward, const FusedOptimizer& optimizer);
  void step_split_rows(TableBackward& backward, const FusedOptimizer& optimizer);
  std::vector<SplitTable> split_tables(TableBackward& backward,
                                       const FusedOptimizer& optimizer) const;
  void exchange_squares(std::vector<SplitTable>& split);
  void step_replica(std::size_t looked, TableBackward& backward, const FusedOptimizer& optimizer);
  void step_replica_on_device(std::size_t looked, TableBackward& backward,
                              const FusedOptimizer& optimizer);

  std::vector<LocalTable*> looked_;  // the tables looked up, by assignment
  std::vector<int> table_of_feature_;
  PooledColumns columns_;
  bool splits_rows_ = false;  // some rank holds only a part of the columns of a fused table
  std::shared_ptr<dist::Group> group_;
  at::Device device_ = at::kCPU;
  std::unique_ptr<TableKernels> kernels_;
};

/// Returns whether the current backward updates a table, by a fused optimizer.
bool takes_steps(const LocalTable& table);

}  // namespace tessera::embedding
