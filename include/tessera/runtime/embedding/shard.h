#pragma once

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "tessera/base/tensor_meta.h"
#include "tessera/layout/table_plan.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/embedding/embedding_bag_collection.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera {

/// What updates a table. Any kernel works with any sharding.
enum class Kernel {
  dense,  // an optimizer of torch::optim; the backward sets `.grad`, averaged over the ranks
  fused,  // the backward itself, with ShardOptions::optimizer; there is no `.grad`
};

/// How the tables of a sharded collection are updated, and which memory they are in.
struct ShardOptions {
  /// The kernel of each table, by table name. Default: fused if there is an `optimizer`, otherwise
  /// dense.
  std::map<std::string, Kernel> kernel{};
  std::optional<embedding::FusedOptimizer> optimizer{};  // of the fused tables
  /// Where tables and their optimizer state are. Default: the device of the collection's weights;
  /// if these are on the CPU or the meta device, the device of the mesh's collectives.
  std::optional<at::Device> device{};
  /// For tables larger than the device's memory: how many rows a rank keeps on the device, by table
  /// name. Weight and optimizer state are then in pinned host memory; the device has copies of the
  /// rows that were looked up last. If one batch needs more rows on a rank, the forward throws
  /// Error(unsupported). A table on the CPU or a shard of at most this many rows is not cached.
  std::map<std::string, std::int64_t> cached_rows{};
};

class ShardedEmbeddingBagCollection;

/// Returns a sharded collection of the same tables. Copies this rank's rows of `collection`, which
/// you may destroy afterwards. Its rows must be equal on all ranks. If it is on the meta device,
/// each rank initialises its shards instead. The initial values depend on one seed from rank 0's
/// default generator, not on the table plan. With an `init_fn` they also depend on the table plan,
/// but replicas are equal. A frozen weight stays frozen. Also copies the optimizer state of a
/// FusedEmbeddingBagCollection. Call `shard` before you create an optimizer.
/// Collective: makes further connections between the ranks. The first forward (or `distribute`)
/// throws Error(mismatch) if ranks have different tables, plans, kernels or kinds of optimizer.
/// Throws:
/// - Error(mismatch) if the table plan is for other tables or another number of ranks, or has an
///   invalid rule;
/// - Error(invalid_argument) if the collection is already sharded, or its tables are on different
///   devices and `options` names none;
/// - Error(invalid_argument) if the mesh has no collectives for the device of the tables;
/// - Error(invalid_argument) if a fused table has no optimizer, or a number of the optimizer is
///   invalid, or a FusedEmbeddingBagCollection has state of another kind of optimizer;
/// - Error(invalid_argument) if `kernel` or `cached_rows` names an unknown table, or `cached_rows`
///   names a dense or data_parallel table, or has a number of rows outside of [1, 2^31);
/// - Error(unsupported) naming table, device and bytes if this rank has too little memory. If
///   another rank cannot make its shards: Error(unsupported) naming that rank.
std::shared_ptr<ShardedEmbeddingBagCollection> shard(const EmbeddingBagCollectionBase& collection,
                                                     const TablePlan& plan, const dist::Mesh& mesh,
                                                     const ShardOptions& options = {});

namespace embedding {
class ShardedTables;
struct Inputs;
}  // namespace embedding

/// A batch on its way to the ranks that hold its rows, made by `distribute`. See `InputPipeline`.
class DistributedInput {
 public:
  explicit DistributedInput(std::shared_ptr<embedding::Inputs> inputs)
      : inputs_(std::move(inputs)) {}
  /// Waits for the first message (id counts) and starts the second (ids). Optional: `forward` does
  /// it too. Collective. Throws: this rank's error, or an error that names the rank at fault.
  void advance();

 private:
  friend class ShardedEmbeddingBagCollection;
  std::shared_ptr<embedding::Inputs> inputs_;
};

/// Tables that are sharded by a plan. A normal module: each rank has its shard as the parameter
/// `embedding_bags.<table>.weight`, even if the shard has no rows, so that all ranks have the same
/// parameter names. State dicts show tables with their whole shapes. Gradients are averaged over
/// the mesh, as by fully_shard and replicate: the loss of a step is the mean of the ranks' losses.
/// fully_shard and replicate ignore this module.
///
/// `forward` and its backward are collective over the mesh. The ranks' batches may differ in size
/// and may be empty. If one rank's batch is invalid, all ranks throw. Each rank gets the unsharded
/// collection's output for its batch. If a table is cut by rows, each shard sums its rows of a bag
/// first; then these sums are added in the order of the mesh's ranks. A second backward throws. A
/// backward for some tensors only (torch::autograd::grad) updates only fused tables among them.
class ShardedEmbeddingBagCollection final : public EmbeddingBagCollectionBase,
                                            public registry::UpdatesParameters {
 public:
  /// Call `shard` instead.
  ShardedEmbeddingBagCollection(const EmbeddingBagCollectionBase& collection, const TablePlan& plan,
                                const dist::Mesh& mesh, const ShardOptions& options);
  ~ShardedEmbeddingBagCollection() override;

  KeyedTensor forward(const KeyedJaggedTensor& batch) override;
  /// Starts to send a batch to the ranks that hold its rows. Compute another batch meanwhile. Then
  /// pass the result to `forward`, which throws if any rank's batch is invalid. Collective.
  DistributedInput distribute(const KeyedJaggedTensor& batch);
  /// Looks up a batch that `distribute` has sent. Collective. Throws: Error(invalid_argument) if
  /// `input` is of another collection, or was looked up already.
  KeyedTensor forward(DistributedInput input);
  /// Call this instead of `distribute` on a rank that has no batch. `forward` then throws on all
  /// ranks: `why` on this rank, and an error that names this rank on the others. Collective.
  DistributedInput refuse_batch(std::exception_ptr why);

  /// Returns the optimizer of the fused tables; std::nullopt if `shard` got none.
  const std::optional<embedding::FusedOptimizer>& optimizer() const;
  /// Sets the numbers of the fused tables' optimizer, such as the learning rate, from the next
  /// backward on. All ranks must set equal numbers. Not collective. Throws: Error(invalid_argument)
  /// for an optimizer of another kind, or an invalid number.
  void set_optimizer(const embedding::FusedOptimizer& optimizer);

  /// Returns the table plan.
  const TablePlan& plan() const;
  /// Writes the rows that are cached on the device back to the weights and optimizer states in host
  /// memory (ShardOptions::cached_rows), and empties the cache. Call it before you read a weight
  /// directly; state dicts, saves and loads call it. Waits for the device. Collective: no.
  void write_back_cached_rows();
  std::shared_ptr<registry::FusedUpdates> fused_updates() const override;

 private:
  friend std::shared_ptr<ShardedEmbeddingBagCollection> shard(
      const EmbeddingBagCollectionBase& collection, const TablePlan& plan, const dist::Mesh& mesh,
      const ShardOptions& options);
  std::shared_ptr<embedding::ShardedTables> sharded_;
};

/// Unsharded tables that the backward updates. `fully_shard` and `replicate` refuse this module,
/// because each rank would update its own copy differently; use what `shard` makes of it.
class FusedEmbeddingBagCollection final : public EmbeddingBagCollectionBase,
                                          public registry::UpdatesParameters {
 public:
  FusedEmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                              const embedding::FusedOptimizer& optimizer,
                              const EmbeddingBagCollectionOptions& options = {});
  ~FusedEmbeddingBagCollection() override;
  KeyedTensor forward(const KeyedJaggedTensor& batch) override;
  /// Returns the optimizer, with its current numbers.
  const embedding::FusedOptimizer& optimizer() const;
  /// Does what ShardedEmbeddingBagCollection::set_optimizer does.
  void set_optimizer(const embedding::FusedOptimizer& optimizer);
  std::shared_ptr<registry::FusedUpdates> fused_updates() const override;

 private:
  std::shared_ptr<embedding::ShardedTables> tables_alone_;
};

inline std::shared_ptr<ShardedEmbeddingBagCollection> shard(
    const std::shared_ptr<EmbeddingBagCollection>& collection, const TablePlan& plan,
    const dist::Mesh& mesh, const ShardOptions& options = {}) {
  return shard(*collection, plan, mesh, options);
}

/// Returns the name, dtype and unsharded shape of a parameter that `shard` or `fully_shard`
/// manages, named within its collection or unit. Returns std::nullopt for other parameters.
std::optional<TensorMeta> global_meta(const at::Tensor& parameter);

namespace embedding {

/// Switches to Tessera's CUDA kernels, instead of ATen's operators, for tables on a CUDA device.
/// Call it before you make collections (`shard`, FusedEmbeddingBagCollection); earlier ones do not
/// change. Link `tessera::cuda_tables`, which depends on CUDA. Thread-safe.
void use_cuda_kernels();

}  // namespace embedding

}  // namespace tessera
