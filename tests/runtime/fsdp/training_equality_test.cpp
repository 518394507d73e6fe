#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

using test::Block;
using test::Transformer;
using test::TransformerImpl;

constexpr std::size_t kNumSteps = 10;
constexpr int kBatch = 12;  // of which each rank takes its share

struct Setup {
  ShardingStrategy strategy;
  int world_size;
  friend void PrintTo(const Setup& setup, std::ostream* out) {
    *out << to_string(setup.strategy) << " on " << setup.world_size;
  }
};

Transformer make_model() {
  Transformer model{nullptr};
  test::with_generator([&] {
    torch::manual_seed(0);
    model = Transformer();
  });
  return model;
}

struct Batch {
  at::Tensor ids;
  at::Tensor targets;
};

Batch make_batch(std::size_t step) {
  Batch batch;
  test::with_generator([&] {
    torch::manual_seed(100 + step);
    batch.ids = torch::randint(TransformerImpl::kVocabulary, {kBatch, 5}, torch::kLong);
    batch.targets = torch::randint(TransformerImpl::kVocabulary, {kBatch, 5}, torch::kLong);
  });
  return batch;
}

/// The rows of a batch that a rank trains on.
at::Tensor share_of(const at::Tensor& batch, const dist::Mesh& mesh) {
  return batch.chunk(mesh.world_size())[static_cast<std::size_t>(mesh.rank())];
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.to(torch::kFloat).flatten(0, 1),
                                              targets.flatten());
}

/// The results of a run: each step's loss and gradient norm, and the parameters at the end.
struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::map<std::string, at::Tensor> parameters;
};

Outcome train_unsharded() {
  Transformer model = make_model();
  torch::optim::SGD optimizer(test::unique_parameters(*model),
                              torch::optim::SGDOptions(0.05).momentum(0.9));
  Outcome outcome;
  for (std::size_t step = 0; step < kNumSteps; ++step) {
    const Batch batch = make_batch(step);
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model->forward(batch.ids), batch.targets);
    loss.backward();
    outcome.norms.push_back(
        torch::nn::utils::clip_grad_norm_(test::unique_parameters(*model), 0.5));
    optimizer.step();
    outcome.losses.push_back(loss.item<double>());
  }
  for (const auto& parameter : model->named_parameters()) {
    outcome.parameters[parameter.key()] = parameter.value().detach();
  }
  return outcome;
}

/// Returns whole parameters, read in a forward scope without gradients.
std::map<std::string, at::Tensor> whole_parameters(TransformerImpl& model) {
  const at::NoGradGuard no_grad;
  const ForwardScope scope(model);
  std::map<std::string, at::Tensor> whole;
  for (const auto& parameter : model.named_parameters()) {
    whole[parameter.key()] = parameter.value().clone();
  }
  return whole;
}

Outcome train_sharded(const dist::Mesh& mesh, const FullyShardOptions& options) {
  Transformer model = make_model();
  fully_shard(*model, options);
  torch::optim::SGD optimizer(test::unique_parameters(*model),
                              torch::optim::SGDOptions(0.05).momentum(0.9));
  Outcome outcome;
  for (std::size_t step = 0; step < kNumSteps; ++step) {
    test::stand_at("step " + std::to_string(step));
    const Batch batch = make_batch(step);
    optimizer.zero_grad();
    const at::Tensor logits = forward(model, share_of(batch.ids, mesh));
    const at::Tensor loss = loss_of(logits, share_of(batch.targets, mesh));
    loss.backward();
    outcome.norms.push_back(clip_grad_norm_(*model, 0.5));
    optimizer.step();
    at::Tensor mean = loss.detach().clone();
    mesh.world()->all_reduce(mean, "loss").wait();
    outcome.losses.push_back(mean.item<double>() / mesh.world_size());
  }
  outcome.parameters = whole_parameters(*model);
  return outcome;
}

class TrainingEqualityTest : public ::testing::TestWithParam<Setup> {};

// Shows B1, B10, B12.
TEST_P(TrainingEqualityTest, EqualsTheUnshardedRun) {
  const Outcome expected = train_unsharded();
  const auto& [strategy, world_size] = GetParam();
  dist::MeshOptions mesh_options;
  const bool is_hybrid = strategy == HYBRID_SHARD || strategy == HYBRID_SHARD_ZERO2;
  if (is_hybrid) mesh_options.axes = {{"replicate", 2}, {"shard", -1}};
  test::on_ranks(
      world_size,
      [&, strategy = strategy](const dist::Mesh& mesh) {
        const Outcome found = train_sharded(
            mesh, {.mesh = mesh, .policy = ModuleWrapPolicy<Block>(), .strategy = strategy});
        for (std::size_t step = 0; step < kNumSteps; ++step) {
          EXPECT_NEAR(found.losses[step], expected.losses[step], 1e-6 * expected.losses[step]);
          EXPECT_NEAR(found.norms[step], expected.norms[step], 1e-6 * expected.norms[step]);
        }
        ASSERT_EQ(found.parameters.size(), expected.parameters.size());
        for (const auto& [fqn, tensor] : expected.parameters) {
          ASSERT_EQ(found.parameters.count(fqn), 1U) << fqn;
          ASSERT_EQ(found.parameters.at(fqn).sizes(), tensor.sizes()) << fqn;
          EXPECT_LT((found.parameters.at(fqn) - tensor).abs().max().item<double>(),
                    1e-6 * tensor.abs().max().item<double>())
              << fqn;
        }
      },
      mesh_options);
}

INSTANTIATE_TEST_SUITE_P(Strategies, TrainingEqualityTest,
                         ::testing::Values(Setup{FULL_SHARD, 1}, Setup{FULL_SHARD, 2},
                                           Setup{FULL_SHARD, 3}, Setup{FULL_SHARD, 4},
                                           Setup{SHARD_GRAD_OP, 2}, Setup{SHARD_GRAD_OP, 3},
                                           Setup{NO_SHARD, 1}, Setup{NO_SHARD, 2},
                                           Setup{NO_SHARD, 3}, Setup{HYBRID_SHARD, 4},
                                           Setup{HYBRID_SHARD_ZERO2, 4}, Setup{HYBRID_SHARD, 2}));

}  // namespace
}  // namespace tessera
