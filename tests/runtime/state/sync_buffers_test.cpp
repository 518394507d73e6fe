#include "tessera/runtime/state/module_state_dict.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/support/checks.h"
#include "support/temporary_directory.h"

namespace tessera {
namespace {

using test::seeded;

constexpr int kNumNorms = 5;  // so many that ranks would share the writing of equal buffers

struct NormsImpl : torch::nn::Module {
  NormsImpl() {
    for (int i = 0; i < kNumNorms; ++i) {
      norms.push_back(register_module("norm" + std::to_string(i), torch::nn::BatchNorm1d(4)));
    }
    last = register_module("last", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& norm : norms) x = norm->forward(x);
    return last->forward(x);
  }
  std::vector<torch::nn::BatchNorm1d> norms;
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Norms);

/// A strategy of fully_shard, or none: replicate.
using Wrapping = std::optional<ShardingStrategy>;

bool is_hybrid(Wrapping way) {
  return way == HYBRID_SHARD || way == HYBRID_SHARD_ZERO2;
}

void apply(Wrapping way, Norms& model, const dist::Mesh& mesh) {
  if (!way) return replicate(*model, {.mesh = mesh});
  fully_shard(*model, {.mesh = mesh, .strategy = *way});
}

/// Runs `body` on `num_ranks` ranks; under a hybrid strategy on twice as many, in two replicas.
void on_ranks_of(Wrapping way, int num_ranks, const std::function<void(const dist::Mesh&)>& body) {
  dist::MeshOptions options;
  if (is_hybrid(way)) options.axes = {{"replicate", 2}, {"shard", num_ranks}};
  test::on_ranks(is_hybrid(way) ? 2 * num_ranks : num_ranks, body, options);
}

at::Tensor rows_of(int rank) {
  return torch::arange(12).reshape({3, 4}).to(torch::kFloat) * (rank + 1);
}

/// Returns the buffers that a rank has after one forward on its own rows.
std::map<std::string, at::Tensor> expected_buffers(int rank) {
  Norms alone = seeded<Norms>();
  alone->forward(rows_of(rank));
  std::map<std::string, at::Tensor> buffers;
  for (const auto& each : alone->named_buffers()) buffers[each.key()] = each.value().clone();
  return buffers;
}

class SyncBuffersTest : public ::testing::TestWithParam<Wrapping> {};

// Shows C7.
TEST_P(SyncBuffersTest, WhatIsSavedOfBuffersIsRankZeros) {
  const test::TemporaryDirectory directory;
  on_ranks_of(GetParam(), 2, [&](const dist::Mesh& mesh) {
    Norms model = seeded<Norms>();
    apply(GetParam(), model, mesh);
    {
      const at::NoGradGuard no_grad;
      forward(model, rows_of(mesh.rank()));
    }
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    TrainState state{model, optimizer};
    save(state, directory.path() + "/step-1");
    Norms other = seeded<Norms>();
    apply(GetParam(), other, mesh);
    torch::optim::SGD other_optimizer(other->parameters(), 0.1);
    TrainState loaded{other, other_optimizer};
    load(loaded, directory.path() + "/step-1");
    for (const auto& [name, expected] : expected_buffers(0)) {
      EXPECT_TRUE(other->named_buffers()[name].equal(expected)) << name;
    }
  });
}

// Shows C7.
TEST_P(SyncBuffersTest, BuffersAreMadeEqual) {
  on_ranks_of(GetParam(), 3, [&](const dist::Mesh& mesh) {
    for (const BufferSync how : {BufferSync::rank0, BufferSync::mean}) {
      Norms model = seeded<Norms>();
      apply(GetParam(), model, mesh);
      {
        const at::NoGradGuard no_grad;
        forward(model, rows_of(mesh.rank()));
      }
      sync_buffers(*model, how);
      auto expected = expected_buffers(0);
      for (auto& [name, buffer] : expected) {
        if (how != BufferSync::mean || !buffer.is_floating_point()) continue;
        for (int rank = 1; rank < mesh.world_size(); ++rank) {
          buffer += expected_buffers(rank).at(name);
        }
        buffer /= mesh.world_size();
      }
      for (const auto& each : model->named_buffers()) {
        EXPECT_TRUE(torch::allclose(each.value(), expected.at(each.key()))) << each.key();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, SyncBuffersTest,
                         ::testing::Values(Wrapping(FULL_SHARD), Wrapping(SHARD_GRAD_OP),
                                           Wrapping(NO_SHARD), Wrapping(HYBRID_SHARD),
                                           Wrapping(HYBRID_SHARD_ZERO2), Wrapping()),
                         [](const auto& each) {
                           return each.param ? std::string(to_string(*each.param)) : "replicate";
                         });

}  // namespace
}  // namespace tessera
