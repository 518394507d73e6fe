#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/embedding/fused_state.h"
#include "runtime/embedding/input.h"
#include "runtime/embedding/lookup.h"
#include "runtime/embedding/pooled_blocks.h"
#include "runtime/embedding/side_stream.h"
#include "runtime/registry/meeting_point.h"
#include "tessera/runtime/embedding/shard.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera::embedding {

class ShardedTables;

/// A batch that is being sent to the ranks that hold its rows.
struct Inputs {
  std::weak_ptr<const ShardedTables> tables;  // the tables that look the batch up
  bool is_used = false;                       // whether the batch has been looked up
  std::unique_ptr<Input> sharded;             // for the tables that are not data_parallel
  /// For data_parallel tables, which look up only this rank's batch.
  std::unique_ptr<Input> replicated;
  ResidentBags resident;  // the bags of `sharded`, if rows are cached; set by the lookup
  at::Tensor weights;     // sample weights of the batch, float32, with autograd history

  /// Starts the second message of both inputs (Input::advance).
  void advance() {
    sharded->advance();
    replicated->advance();
  }
};

/// One rank's tables according to a plan, and their lookup over all ranks.
class ShardedTables : public std::enable_shared_from_this<ShardedTables> {
 public:
  /// Copies this rank's shards of `collection`; fills meta tensors. Collective. Throws as `shard`.
  ShardedTables(const EmbeddingBagCollectionBase& collection, const TablePlan& plan,
                const dist::Mesh& mesh, const ShardOptions& options);

  const TableSet& tables() const { return tables_; }
  const TablePlan& plan() const { return plan_; }
  const dist::Mesh& mesh() const { return mesh_; }
  std::vector<LocalTable>& local() { return local_; }  // one per table, in the order of `tables()`

  /// Starts to send a batch to the ranks that hold its rows. Collective.
  std::shared_ptr<Inputs> start(const KeyedJaggedTensor& batch);
  /// Returns `forward(start(batch))`. Collective.
  at::Tensor forward(const KeyedJaggedTensor& batch);
  /// For a rank whose batch is invalid: takes part in the collectives of `start`. Later, `forward`
  /// and Inputs::advance throw on all ranks; on this rank they throw `why`. Collective.
  std::shared_ptr<Inputs> refuse(std::exception_ptr why);
  /// Returns the pooled output `[batch, output width]`. Gradients flow to the weights of the tables
  /// and to the sample weights of the batch. Collective; so is the backward. Throws:
  /// Error(invalid_argument) if the inputs are of another collection, or were looked up already.
  at::Tensor forward(const std::shared_ptr<Inputs>& inputs);

  /// Returns the meeting point of this module, a barrier. If the module is inside a fully sharded
  /// model, all ranks wait there for each other before the module's collectives begin.
  const std::shared_ptr<registry::MeetingPoint>& meeting_point() const { return meeting_point_; }

  /// Returns the state dict entry of a table's weight, or of its optimizer state.
  StateTensor weight_entry(const LocalTable& table) const;
  StateTensor state_entry(const LocalTable& table, const FusedState::Slot& slot) const;

  /// As ShardedEmbeddingBagCollection::write_back_cached_rows.
  void write_back_cached_rows();

  const std::optional<FusedOptimizer>& optimizer() const { return optimizer_; }
  /// Changes the optimizer's settings. Throws: Error(invalid_argument) for another kind of
  /// optimizer, or invalid settings.
  void set_optimizer(const FusedOptimizer& optimizer);

 private:
  friend class LookupNode;
  std::shared_ptr<Inputs> start(const OwnBatch& batch);
  std::uint64_t fingerprint() const;
  void compare_tables();
  void check_cached_rows(const ShardOptions& options) const;
  /// Brings the rows that a batch needs of cached tables to the device. Returns the bags, in which
  /// slots replace the ids of these tables. Throws on all ranks if a rank's cache is too small.
  const LocalBags& fetched_bags(Inputs& inputs);
  at::Tensor looked_up(const std::shared_ptr<Inputs>& inputs,
                       const registry::MeetingPoint::Passes& passes);
  at::Tensor pooled(Inputs& inputs);
  /// Pools the bags that look up this rank's shards, and exchanges the results. Writes to `output`
  /// the sum of what all ranks have pooled for this rank's samples.
  void exchange_pooled(const LocalBags& bags, const Input& input, at::Tensor& output) const;
  at::Tensor exchange_gradient(const Input& input, const at::Tensor& gradient) const;
  /// Returns, for each rank, how many elements this rank pools for that rank.
  std::vector<std::int64_t> pooled_here(const Input& input) const;
  /// Returns, for each rank, how many elements that rank pools for this rank.
  std::vector<std::int64_t> pooled_for_own(const Input& input) const;
  /// Returns the tables' gradients, parallel to `local_`; undefined for tables without a gradient.
  /// If `moves_tables` is false, only sample weights get gradients, and the tables stay unchanged.
  std::vector<at::Tensor> backward(Inputs& inputs, at::Tensor gradient, at::Tensor weight_gradients,
                                   bool moves_tables);
  void lay_out_columns(const Assignments& sharded, const std::vector<Assignment>& replicated);
  void allocate(LocalTable& local, const ShardOptions& options) const;
  at::TensorOptions float_options() const { return at::TensorOptions(device_).dtype(at::kFloat); }
  void place_all(const EmbeddingBagCollectionBase& collection, const ShardOptions& options);
  LocalTable place(const EmbeddingBagCollectionBase& collection, std::size_t table,
                   const ShardOptions& options, std::optional<std::uint64_t> seed);

  TableSet tables_;
  TablePlan plan_;
  dist::Mesh mesh_;
  std::optional<FusedOptimizer> optimizer_;
  at::Device device_;                   // the device of all tables
  std::shared_ptr<dist::Group> world_;  // all ranks; a connection for lookups only
  std::shared_ptr<dist::Group> alone_;  // this rank's group of one
  // Null on the CPU. On a device, batches have a connection of their own: the messages of one
  // connection run in order, and those of a later batch must not wait for a lookup.
  std::shared_ptr<dist::Group> input_group_;
  std::shared_ptr<SideStream> input_stream_;
  bool have_equal_tables_ = false;  // compare_tables has found equal tables
  bool has_caches_ = false;         // the options name cached tables; equal on all ranks
  std::vector<LocalTable> local_;
  std::shared_ptr<const Assignments> sharded_;     // the shards that each rank looks up
  std::shared_ptr<const Assignments> replicated_;  // the data_parallel tables, in one list
  std::vector<PooledColumns> pooled_columns_;      // one per rank
  std::vector<RankBlocks> blocks_;  // one per rank, with one block per item of its pooled columns
  bool covers_output_ = false;  // each output column is written, so the output needs no zeros first
  bool has_means_ = false;
  std::uint64_t static_fingerprint_ = 0;  // hash of tables, plan and options, which never change
  std::shared_ptr<registry::MeetingPoint> meeting_point_ =
      std::make_shared<registry::MeetingPoint>();
  Lookup sharded_lookup_;
  Lookup replicated_lookup_;
};

}  // namespace tessera::embedding
