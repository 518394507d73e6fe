#include "runtime/embedding/sharded_training.h"

#include <gtest/gtest.h>

#include "tessera/tessera.h"

namespace tessera::test {
namespace {

constexpr int kNumSteps = 5;

std::vector<KeyedJaggedTensor> batches_of(int world_size, int step, const TableOptions& options) {
  std::vector<KeyedJaggedTensor> batches;
  for (int rank = 0; rank < world_size; ++rank) {
    batches.push_back(small_batch(rank, step, options));
  }
  return batches;
}

/// Returns the batch with weights that require a gradient.
KeyedJaggedTensor with_weight_gradients(const KeyedJaggedTensor& batch) {
  if (!batch.has_weights()) return batch;
  return KeyedJaggedTensor::from_lengths(batch.keys(), batch.values(), batch.lengths(),
                                         batch.weights().clone().requires_grad_());
}

/// Returns the rows of one rank from a tensor with the rows of all ranks, in order of rank.
at::Tensor rows_of_rank(const at::Tensor& all, int rank, int step) {
  std::int64_t begin = 0;
  for (int before = 0; before < rank; ++before) begin += small_batch_size(before, step);
  return all.narrow(0, begin, small_batch_size(rank, step));
}

/// Returns a rank's weights from those of all ranks, which are in order of feature, then rank.
at::Tensor weights_of_rank(const at::Tensor& all, int rank, int step, int world_size,
                           const TableOptions& options) {
  const auto batches = batches_of(world_size, step, options);
  std::vector<at::Tensor> own;
  std::int64_t begin = 0;
  for (const std::string& key : batches.front().keys()) {
    for (int each = 0; each < world_size; ++each) {
      const std::int64_t num_ids = batches[static_cast<std::size_t>(each)][key].values().numel();
      if (each == rank) own.push_back(all.narrow(0, begin, num_ids));
      begin += num_ids;
    }
  }
  return torch::cat(own);
}

}  // namespace

void expect_close(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  const double scale = expected.numel() == 0 ? 1 : 1e-6 + expected.abs().max().item<double>();
  const double difference =
      expected.numel() == 0 ? 0 : (found - expected).abs().max().item<double>() / scale;
  EXPECT_LE(difference, 2e-6) << what;
}

void expect_close(const StateDict& found, const StateDict& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (const StateDict::Item& item : expected) {
    const StateEntry* const other = found.find(item.fqn);
    ASSERT_NE(other, nullptr) << what << ": " << item.fqn;
    if (const auto* const tensor = std::get_if<StateTensor>(&item.entry)) {
      expect_close(found.tensor(item.fqn), tensor->tensor(item.fqn), what + ": " + item.fqn);
      EXPECT_EQ(std::get<StateTensor>(*other).kind, tensor->kind) << what << ": " << item.fqn;
    } else {
      EXPECT_EQ(std::get<Value>(*other), std::get<Value>(item.entry)) << what << ": " << item.fqn;
    }
  }
}

Trained train_alone(int world_size, const Way& way) {
  const TableOptions& options = way.options;
  EmbeddingBagCollectionOptions collection;
  collection.is_weighted = options.is_weighted;
  FusedEmbeddingBagCollection tables(small_tables(options), way.optimizer, collection);
  Trained trained;
  for (int step = 0; step < kNumSteps; ++step) {
    const KeyedJaggedTensor batch =
        with_weight_gradients(joined(batches_of(world_size, step, options)));
    const KeyedTensor pooled = tables.forward(batch);
    (loss_of(pooled.values()) / world_size).backward();
    trained.outputs.push_back(pooled.values().detach());
    if (batch.has_weights()) trained.weight_gradients.push_back(batch.weights().grad());
  }
  trained.state = state_dict(tables);
  trained.optimizer_state = optim_state_dict(tables);
  return trained;
}

Trained train_sharded(const dist::Mesh& mesh, const PlanKind& kind, const Way& way,
                      const ShardOptions& options, at::Device batch_device) {
  ShardOptions with_optimizer = options;
  with_optimizer.optimizer = way.optimizer;
  const auto tables =
      shard(small_collection(way.options), plan_of(kind, mesh.world_size()), mesh, with_optimizer);
  Trained trained;
  for (int step = 0; step < kNumSteps; ++step) {
    const KeyedJaggedTensor batch =
        with_weight_gradients(small_batch(mesh.rank(), step, way.options).to(batch_device));
    const KeyedTensor pooled = tables->forward(batch);
    loss_of(pooled.values()).backward();
    trained.outputs.push_back(pooled.values().detach().cpu());
    if (batch.has_weights()) trained.weight_gradients.push_back(batch.weights().grad().cpu());
  }
  trained.state = state_dict(*tables, {.offload_to_cpu = true});
  trained.optimizer_state = optim_state_dict(*tables, {.offload_to_cpu = true});
  return trained;
}

std::string Way::name() const {
  return std::string(embedding::name_of(optimizer)) +
         (options.pooling == Pooling::mean ? ", mean" : ", sum") +
         (options.is_weighted ? ", weighted" : "");
}

std::vector<Way> all_ways() {
  std::vector<Way> ways;
  for (const Pooling pooling : {Pooling::sum, Pooling::mean}) {
    for (const bool is_weighted : {false, true}) {
      for (const embedding::FusedOptimizer& optimizer : fused_optimizers()) {
        ways.push_back({{is_weighted, pooling}, optimizer});
      }
    }
  }
  return ways;
}

void expect_shards_of(const Trained& alone, const Trained& sharded, const Way& way,
                      const dist::Mesh& mesh) {
  for (int step = 0; step < kNumSteps; ++step) {
    const auto at = static_cast<std::size_t>(step);
    const std::string place = way.name() + ", step " + std::to_string(step);
    expect_close(sharded.outputs[at], rows_of_rank(alone.outputs[at], mesh.rank(), step), place);
    if (!way.options.is_weighted) continue;
    expect_close(sharded.weight_gradients[at],
                 weights_of_rank(alone.weight_gradients[at], mesh.rank(), step, mesh.world_size(),
                                 way.options) *
                     mesh.world_size(),
                 place + ", gradients of weights");
  }
  expect_close(sharded.state, alone.state, way.name());
  expect_close(sharded.optimizer_state, alone.optimizer_state, way.name());
}

}  // namespace tessera::test
