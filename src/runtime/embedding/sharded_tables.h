#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/embedding/fused_state.h"
#include "runtime/embedding/input_exchange.h"
#include "runtime/embedding/lookup.h"
#include "runtime/registry/meeting_point.h"
#include "tessera/runtime/embedding/shard.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera::embedding {

class ShardedTables;

/// A batch on its way, for tables of both kinds.
struct Inputs {
  std::weak_ptr<const ShardedTables> tables;  // that it is for
  bool is_used = false;                       // has been looked up
  std::unique_ptr<Input> sharded;
  std::unique_ptr<Input> replicated;  // of data_parallel tables: this rank's own batch
  at::Tensor weights;                 // of the batch, float32, with their autograd history
};

/// The tables of a collection as a rank holds them by a plan, and their lookup over all ranks.
class ShardedTables : public std::enable_shared_from_this<ShardedTables> {
 public:
  /// Throws as `shard` does. Rows are taken from `collection`.
  ShardedTables(const EmbeddingBagCollectionBase& collection, const TablePlan& plan,
                const dist::Mesh& mesh, const ShardOptions& options);

  const TableSet& tables() const { return tables_; }
  const TablePlan& plan() const { return plan_; }
  const dist::Mesh& mesh() const { return mesh_; }
  std::vector<LocalTable>& local() { return local_; }  // parallel to the tables

  /// Collective.
  std::shared_ptr<Inputs> start(const KeyedJaggedTensor& batch);
  /// As `forward(start(batch))`.
  at::Tensor forward(const KeyedJaggedTensor& batch);
  /// Takes part without a batch. Collective.
  std::shared_ptr<Inputs> refuse(std::exception_ptr why);
  /// Returns `[batch, output width]`, a function of the weights of the tables and of the batch.
  /// Collective; so is the backward. Throws: Error(invalid_argument) where the inputs are another
  /// collection's, or have been looked up.
  at::Tensor forward(const std::shared_ptr<Inputs>& inputs);

  /// Kept at the module, so that a pass over a root above it has all ranks come to its collectives.
  const std::shared_ptr<registry::MeetingPoint>& meeting_point() const { return meeting_point_; }

  /// What a table's weight is in a state dict; pieces of row-wise state likewise.
  StateTensor weight_entry(const LocalTable& table) const;
  StateTensor state_entry(const LocalTable& table, const FusedState::Slot& slot) const;

  const std::optional<FusedOptimizer>& optimizer() const { return optimizer_; }
  /// Throws: Error(invalid_argument) for one of another kind, or numbers that no optimizer has.
  void set_optimizer(const FusedOptimizer& optimizer);

 private:
  friend class LookupNode;
  /// Columns of the output that are columns of what a rank pools.
  struct Block {
    std::int64_t from = 0;
    std::int64_t to = 0;
    std::int64_t width = 0;
    bool is_first = false;  // to write there: later ones have other rows of the table
  };
  std::shared_ptr<Inputs> start(const OwnBatch& batch);
  std::uint64_t fingerprint() const;
  at::Tensor looked_up(const std::shared_ptr<Inputs>& inputs,
                       const registry::MeetingPoint::Passes& passes);
  at::Tensor pooled(Inputs& inputs);
  /// Pools on all ranks, and adds up what this rank's samples get.
  void exchange_pooled(const LocalBags& bags, const Input& input, at::Tensor& output) const;
  at::Tensor exchange_gradient(const Input& input, const at::Tensor& gradient) const;
  /// How much this rank pools for each rank, and each rank for this one. Units: elements.
  std::vector<std::int64_t> pooled_here(const Input& input) const;
  std::vector<std::int64_t> pooled_for_own(const Input& input) const;
  /// Returns the tables' gradients, undefined where there are none, parallel to `local_`.
  /// `moves_tables`: false leaves the tables alone.
  std::vector<at::Tensor> backward(Inputs& inputs, at::Tensor gradient, at::Tensor weight_gradients,
                                   bool moves_tables);
  void lay_out_columns(const Assignments& sharded, const std::vector<Assignment>& replicated);
  LocalTable place(const EmbeddingBagCollectionBase& collection, std::size_t table,
                   const ShardOptions& options, std::optional<std::uint64_t> seed);

  TableSet tables_;
  TablePlan plan_;
  dist::Mesh mesh_;
  std::optional<FusedOptimizer> optimizer_;
  std::shared_ptr<dist::Group> world_;  // all ranks, in an order of collectives of its own
  std::shared_ptr<dist::Group> alone_;  // this rank's group of one
  std::vector<LocalTable> local_;
  std::shared_ptr<const Assignments> sharded_;     // by rank
  std::shared_ptr<const Assignments> replicated_;  // of this rank alone
  std::vector<PooledColumns> pooled_columns_;      // of what each rank pools of `sharded_`
  std::vector<std::vector<Block>> blocks_;         // by rank, parallel to its pooled columns
  bool covers_output_ = false;                     // whether every column of it is some table's
  bool has_means_ = false;
  std::uint64_t static_fingerprint_ = 0;  // of all that does not change
  std::shared_ptr<registry::MeetingPoint> meeting_point_ =
      std::make_shared<registry::MeetingPoint>();
  Lookup sharded_lookup_;
  Lookup replicated_lookup_;
};

}  // namespace tessera::embedding
