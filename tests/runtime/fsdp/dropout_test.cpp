#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"
#include "runtime/support/processes.h"

// Dropout draws masks from the process's generator, so each rank here is a process, not a thread.

namespace tessera {
namespace {

constexpr int kNumSteps = 4;
constexpr int kNumRows = 6;  // of all ranks together

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int width) {
    linear = register_module("linear", torch::nn::Linear(width, width));
    dropout = register_module("dropout", torch::nn::Dropout(0.4));
  }
  at::Tensor forward(at::Tensor x) { return torch::tanh(dropout(linear(x))); }
  torch::nn::Linear linear{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Layer);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::optional<RecomputeOptions> options = {}) : recomputation(options) {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Layer(9)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Layer& layer : layers) {
      x = recomputation ? recompute(*recomputation, layer.ptr(), x) : layer(x);
    }
    return x;
  }
  std::optional<RecomputeOptions> recomputation;
  std::vector<Layer> layers;
};
TORCH_MODULE(Net);

at::Tensor batch_of(int step) {
  torch::manual_seed(static_cast<std::uint64_t>(step));
  return torch::rand({kNumRows, 9});
}

/// Seeds the generator that a rank draws its masks from.
void seed(int step, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + 10 * step + rank));
}

/// Trains on all ranks' rows, with the masks that each rank draws.
std::vector<at::Tensor> train_unsharded(int world_size) {
  torch::manual_seed(7);
  Net model;
  torch::optim::AdamW optimizer(model->parameters(), 0.01);
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    const auto chunks = batch_of(step).chunk(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      seed(step, rank);
      (model(chunks[static_cast<std::size_t>(rank)]).square().mean() / world_size).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

std::vector<at::Tensor> train_sharded(const dist::Mesh& mesh,
                                      const std::optional<RecomputeOptions>& recomputation) {
  torch::manual_seed(7);
  Net model(recomputation);
  fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<Layer>()});
  torch::optim::AdamW optimizer(model->parameters(), 0.01);
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    const auto chunks = batch_of(step).chunk(mesh.world_size());
    seed(step, mesh.rank());
    forward(model, chunks[static_cast<std::size_t>(mesh.rank())]).square().mean().backward();
    optimizer.step();
  }
  const at::NoGradGuard no_grad;
  const ForwardScope scope(*model);
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : model->parameters()) parameters.push_back(parameter.clone());
  return parameters;
}

TEST(DropoutTest, DISABLED_AsOneRank) {
  test::as_process([](const dist::Mesh& mesh) -> std::string {
    const std::vector<at::Tensor> expected = train_unsharded(mesh.world_size());
    const std::vector<std::optional<RecomputeOptions>> ways = {
        std::nullopt, RecomputeOptions{},
        RecomputeOptions{.recomputation = Recomputation::reentrant}};
    for (const auto& way : ways) {
      const std::vector<at::Tensor> found = train_sharded(mesh, way);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const double difference = (found[i] - expected[i]).abs().max().item<double>();
        if (!(difference < 1e-6)) {
          return "parameter " + std::to_string(i) + " differs by " + std::to_string(difference);
        }
      }
    }
    return "equal";
  });
}

// Shows B1, B19.
TEST(DropoutTest, EveryRankDrawsItsOwnMasksAndDrawsThemAgainInRecomputation) {
  for (const int world_size : {1, 2, 3}) {
    const auto said = test::run_processes(world_size, "DropoutTest.DISABLED_AsOneRank");
    EXPECT_THAT(said, ::testing::Each("equal")) << world_size;
  }
}

}  // namespace
}  // namespace tessera
