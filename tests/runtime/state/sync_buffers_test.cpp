#include "tessera/runtime/state/module_state_dict.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

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

enum class Wrapping { full_shard, shard_grad_op, no_shard, replicate };

void apply(Wrapping way, Norms& model, const dist::Mesh& mesh) {
  if (way == Wrapping::replicate) return replicate(*model, {.mesh = mesh});
  const ShardingStrategy strategy = way == Wrapping::full_shard      ? FULL_SHARD
                                    : way == Wrapping::shard_grad_op ? SHARD_GRAD_OP
                                                                     : NO_SHARD;
  fully_shard(*model, {.mesh = mesh, .strategy = strategy});
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
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
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
  test::on_ranks(3, [&](const dist::Mesh& mesh) {
    for (const BufferSync how : {BufferSync::rank0, BufferSync::mean}) {
      Norms model = seeded<Norms>();
      apply(GetParam(), model, mesh);
      {
        const at::NoGradGuard no_grad;
        forward(model, rows_of(mesh.rank()));
      }
      sync_buffers(*model, how);
      const auto first = expected_buffers(0), second = expected_buffers(1),
                 third = expected_buffers(2);
      for (const auto& each : model->named_buffers()) {
        const std::string& name = each.key();
        const bool is_mean = how == BufferSync::mean && each.value().is_floating_point();
        const at::Tensor expected =
            is_mean ? (first.at(name) + second.at(name) + third.at(name)) / 3 : first.at(name);
        EXPECT_TRUE(torch::allclose(each.value(), expected)) << name;
      }
    }
  });
}

std::string name_of(const ::testing::TestParamInfo<Wrapping>& info) {
  switch (info.param) {
    case Wrapping::full_shard:
      return "FULL_SHARD";
    case Wrapping::shard_grad_op:
      return "SHARD_GRAD_OP";
    case Wrapping::no_shard:
      return "NO_SHARD";
    case Wrapping::replicate:
      break;
  }
  return "replicate";
}

INSTANTIATE_TEST_SUITE_P(Ways, SyncBuffersTest,
                         ::testing::Values(Wrapping::full_shard, Wrapping::shard_grad_op,
                                           Wrapping::no_shard, Wrapping::replicate),
                         name_of);

}  // namespace
}  // namespace tessera
