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

/// How a table's gradient reaches its weight, whatever the way in which it is sharded.
enum class Kernel {
  dense,  // as `.grad`, for an optimizer of torch::optim; averaged over the ranks
  fused,  // within the backward, by the collection's own optimizer; there is never a `.grad`
};

/// How gradients reach the tables of a sharded collection.
struct ShardOptions {
  /// By table. Tables that are not named: fused where there is an optimizer, else dense.
  std::map<std::string, Kernel> kernel{};
  std::optional<embedding::FusedOptimizer> optimizer{};  // of the fused tables
};

class ShardedEmbeddingBagCollection;

/// Returns a collection of the same tables, sharded. Rows are taken from `collection`, which is the
/// same on all ranks and may be let go. Where it is on the meta device no table is ever whole, and
/// first values come from one number that rank 0 draws from its default generator, and are the same
/// under every plan (an `init_fn`: the same on replicas). A weight that requires no gradient stays
/// frozen. Call it before an optimizer is built. Collective: the ranks connect once more, for the
/// tables' own messages. The first forward throws where ranks have different tables or options.
/// Throws: Error(mismatch) where the plan is for other tables or another number of ranks, or gives
/// a table a rule that cannot be; Error(invalid_argument) where a fused table has no optimizer, a
/// kernel names no table, a number of the optimizer cannot be, or the collection is sharded.
std::shared_ptr<ShardedEmbeddingBagCollection> shard(const EmbeddingBagCollectionBase& collection,
                                                     const TablePlan& plan, const dist::Mesh& mesh,
                                                     const ShardOptions& options = {});

namespace embedding {
class ShardedTables;
struct Inputs;
}  // namespace embedding

/// A batch on its way to the ranks that hold its rows. See `InputPipeline`.
class DistributedInput {
 public:
  explicit DistributedInput(std::shared_ptr<embedding::Inputs> inputs)
      : inputs_(std::move(inputs)) {}
  /// Starts the second of the two messages between ranks, when the first one has come. Collective.
  /// Throws: what is wrong with this rank's batch, or that another rank refused its own.
  void advance();

 private:
  friend class ShardedEmbeddingBagCollection;
  std::shared_ptr<embedding::Inputs> inputs_;
};

/// Tables of which every rank holds what a plan gives it. An ordinary module: under
/// `embedding_bags.<table>.weight` each rank has its shard, also where that has no rows, so that
/// parameters have the same names on all ranks; state dicts tell whole shapes. Averages gradients
/// over the ranks of its mesh, as fully_shard and replicate do with theirs, so that the loss of
/// a step is the mean of the ranks' losses; those two leave it alone around them.
///
/// `forward` and its backward are collective over the mesh; batches may differ in size and be
/// empty. What a rank refuses about its batch is an error on all.
/// Output: as of the unsharded collection with the same rows, for this rank's batch. A bag of a
/// row-cut table is summed by row block, in the plan's order of ranks.
class ShardedEmbeddingBagCollection final : public EmbeddingBagCollectionBase,
                                            public registry::UpdatesParameters {
 public:
  /// Use `shard`.
  ShardedEmbeddingBagCollection(const EmbeddingBagCollectionBase& collection, const TablePlan& plan,
                                const dist::Mesh& mesh, const ShardOptions& options);
  ~ShardedEmbeddingBagCollection() override;

  KeyedTensor forward(const KeyedJaggedTensor& batch) override;
  /// `forward` in two steps, so that a batch travels while another is computed. Both collective.
  DistributedInput distribute(const KeyedJaggedTensor& batch);
  /// Throws: Error(invalid_argument) for what `distribute` of another collection returned, or for a
  /// batch that has been looked up.
  KeyedTensor forward(DistributedInput input);
  /// In place of `distribute` where this rank has no batch: what `forward` then throws, and all
  /// other ranks throw that it did. Collective.
  DistributedInput refuse_batch(std::exception_ptr why);

  /// The optimizer of the fused tables; nothing where there is none.
  const std::optional<embedding::FusedOptimizer>& optimizer() const;
  /// Gives it other numbers, from the next backward on: a schedule of learning rates. To be the
  /// same on all ranks. Throws: Error(invalid_argument) for an optimizer of another kind.
  void set_optimizer(const embedding::FusedOptimizer& optimizer);

  /// Returns the plan that the tables are sharded by.
  const TablePlan& plan() const;
  std::shared_ptr<registry::FusedUpdates> fused_updates() const override;

 private:
  friend std::shared_ptr<ShardedEmbeddingBagCollection> shard(
      const EmbeddingBagCollectionBase& collection, const TablePlan& plan, const dist::Mesh& mesh,
      const ShardOptions& options);
  std::shared_ptr<embedding::ShardedTables> sharded_;
};

/// Tables of this process alone that are updated within the backward. Not for `fully_shard` or
/// `replicate`, which refuse it: ranks would take different steps.
class FusedEmbeddingBagCollection final : public EmbeddingBagCollectionBase,
                                          public registry::UpdatesParameters {
 public:
  FusedEmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                              const embedding::FusedOptimizer& optimizer,
                              const EmbeddingBagCollectionOptions& options = {});
  ~FusedEmbeddingBagCollection() override;
  KeyedTensor forward(const KeyedJaggedTensor& batch) override;
  /// Returns the optimizer, with the numbers of the next backward.
  const embedding::FusedOptimizer& optimizer() const;
  /// As ShardedEmbeddingBagCollection's.
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

/// Returns the name, dtype and whole shape of a parameter that is a shard of a table (named within
/// its collection) or of a unit of `fully_shard` (named within the unit); nothing for others.
std::optional<TensorMeta> global_meta(const at::Tensor& parameter);

}  // namespace tessera
