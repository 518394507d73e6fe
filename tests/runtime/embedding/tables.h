#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/runtime/embedding/shard.h"

// Small tables with everything that makes sharding hard: fewer rows than ranks, a feature of two
// tables, two features of one table, widths that the number of ranks does not divide.

namespace tessera::test {

struct TableOptions {
  bool is_weighted = false;
  Pooling pooling = Pooling::sum;
  at::ScalarType dtype = at::kFloat;
};

std::vector<EmbeddingBagConfig> small_tables(const TableOptions& options = {});

/// Returns tables with the same rows on every rank and in every run. Rows, sample weights and so
/// gradients are positive: if terms of a gradient cancelled, Adagrad would depend on the last bit.
EmbeddingBagCollection small_collection(const TableOptions& options = {});

/// The batch of rank `rank` in step `step`: batches differ in size, one is empty.
KeyedJaggedTensor small_batch(int rank, int step, const TableOptions& options = {});
std::int64_t small_batch_size(int rank, int step);

/// Joins the batches of all ranks into one, in order of rank.
KeyedJaggedTensor joined(const std::vector<KeyedJaggedTensor>& batches);

/// A way to shard all tables, and its plan at a world size.
struct PlanKind {
  std::string name;
  std::vector<TableSharding> shardings;  // of table i: shardings[i % size]
};
const std::vector<PlanKind>& plan_kinds();
TablePlan plan_of(const PlanKind& kind, int world_size);

const PlanKind& plan_kind(const std::string& name);

/// Returns small_collection() sharded by a kind of plan.
std::shared_ptr<ShardedEmbeddingBagCollection> sharded_collection(
    const dist::Mesh& mesh, const std::string& plan,
    const ShardOptions& options = {.optimizer = embedding::RowWiseAdagrad{.lr = 0.1}});

/// Returns a tensor of ids or lengths.
at::Tensor longs(const std::vector<std::int64_t>& values);

/// A model with tables in it.
struct ModelWithTablesImpl : torch::nn::Module {
  explicit ModelWithTablesImpl(std::shared_ptr<EmbeddingBagCollectionBase> its_tables)
      : tables(register_module("tables", std::move(its_tables))),
        top(register_module("top", torch::nn::Linear(32, 3))) {}
  at::Tensor forward(const KeyedJaggedTensor& batch) {
    return top->forward(tables->forward(batch).values());
  }
  std::shared_ptr<EmbeddingBagCollectionBase> tables;
  torch::nn::Linear top{nullptr};
};
TORCH_MODULE(ModelWithTables);

/// Returns a model with tables. Its linear layer is the same on every rank and in every run.
ModelWithTables model_with(std::shared_ptr<EmbeddingBagCollectionBase> tables);

/// A nonlinear loss: gradients depend on the output, so a wrong row shows in later steps.
at::Tensor loss_of(const at::Tensor& pooled);

/// Every kind of optimizer, some with weight decay or clipping.
std::vector<embedding::FusedOptimizer> fused_optimizers();

}  // namespace tessera::test
