#include <gmock/gmock.h>
#include <torch/torch.h>

#include "cuda/needs_cuda.h"
#include "runtime/support/checks.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::Block;
using test::Transformer;

const at::Device kGpu(torch::kCUDA, 0);
constexpr int kNumSteps = 5;

at::Tensor loss_of(const at::Tensor& logits) {
  return logits.to(torch::kFloat).square().mean();
}

/// Every rank trains on the same batch, so that the mean over ranks is each one's own.
at::Tensor batch_of(int step) {
  return (test::some_ids() + step).remainder(test::TransformerImpl::kVocabulary).to(kGpu);
}

std::vector<double> unsharded_losses() {
  Transformer model = test::seeded<Transformer>();
  model->to(kGpu);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<double> losses;
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model->forward(batch_of(step)));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

std::vector<double> sharded_losses(const FullyShardOptions& options) {
  Transformer model = test::seeded<Transformer>();
  model->to(kGpu);
  fully_shard(*model, options);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<double> losses;
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(forward(model, batch_of(step)));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

struct Setup {
  ShardingStrategy strategy;
  int world_size;
  Offload offload = Offload::none;
  ForwardPrefetch forward_prefetch = ForwardPrefetch::none;
  friend void PrintTo(const Setup& setup, std::ostream* out) {
    *out << to_string(setup.strategy) << " on " << setup.world_size
         << (setup.offload == Offload::params ? ", offloaded" : "");
  }
};

class CudaTrainingTest : public ::testing::TestWithParam<Setup> {};

/// Ranks are threads over Gloo, which carries tensors of a GPU by way of the host; all on one GPU.
/// Shows A5.
TEST_P(CudaTrainingTest, EqualsTheUnshardedRun) {
  TESSERA_NEEDS_CUDA();
  const std::vector<double> expected = unsharded_losses();
  const auto setup = GetParam();
  dist::MeshOptions mesh_options;
  if (setup.strategy == HYBRID_SHARD) mesh_options.axes = {{"replicate", 2}, {"shard", -1}};
  test::on_ranks(
      setup.world_size,
      [&](const dist::Mesh& mesh) {
        const std::vector<double> found =
            sharded_losses({.mesh = mesh,
                            .policy = ModuleWrapPolicy<Block>(),
                            .strategy = setup.strategy,
                            .forward_prefetch = setup.forward_prefetch,
                            .offload = setup.offload});
        for (std::size_t step = 0; step < kNumSteps; ++step) {
          EXPECT_NEAR(found[step], expected[step], 1e-5) << step;
        }
      },
      mesh_options);
}

INSTANTIATE_TEST_SUITE_P(
    Setups, CudaTrainingTest,
    ::testing::Values(Setup{FULL_SHARD, 1}, Setup{FULL_SHARD, 1, Offload::params},
                      Setup{FULL_SHARD, 2}, Setup{FULL_SHARD, 2, Offload::params},
                      Setup{FULL_SHARD, 2, Offload::none, ForwardPrefetch::next},
                      Setup{SHARD_GRAD_OP, 2}, Setup{NO_SHARD, 2}, Setup{HYBRID_SHARD, 4}));

}  // namespace
}  // namespace tessera
