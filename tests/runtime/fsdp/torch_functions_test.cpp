#include <gmock/gmock.h>
#include <torch/torch.h>

#include <sstream>

#include "runtime/support/checks.h"

// Functions of torch that do not know about ranks: refused where they would get shards.

namespace tessera {
namespace {

using test::error_of;
using test::Mlp;
using test::mlp_input;
using test::seeded;
using test::sharded_mlp;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A module that `clone` can copy.
struct CopyableImpl : torch::nn::Cloneable<CopyableImpl> {
  CopyableImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({4, 3})); }
  at::Tensor weight;
};

void backward(Mlp& model) {
  forward(model, mlp_input()).square().sum().backward();
}

TEST(TorchFunctionsTest, ClipGradNormOfTorchIsRefusedByName) {
  for (const ShardingStrategy strategy : {FULL_SHARD, SHARD_GRAD_OP}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Mlp model = sharded_mlp(mesh, strategy);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {  // the second adds to gradients that are there
        backward(model);
        const auto before = test::gradients(*model);
        const std::string error =
            error_of([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 0.1); });
        EXPECT_THAT(
            error,
            AllOf(HasSubstr(
                      "norm of a sharded gradient: expected a call of tessera::clip_grad_norm_"),
                  HasSubstr("was torch::nn::utils::clip_grad_norm_ called?")));
        test::expect_same(test::gradients(*model), before);
      }
      EXPECT_GT(clip_grad_norm_(*model, 0.1), 0.1);
      EXPECT_NEAR(clip_grad_norm_(*model, 0.1), 0.1, 1e-4);
      optimizer.step();
      optimizer.zero_grad();
      backward(model);
    });
  }
}

// What docs/traps.md says about copies.
TEST(TorchFunctionsTest, ACopyOfAShardedModuleIsAPlainModuleOfShards) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model, {.mesh = mesh});
    const auto copy = model->clone();
    EXPECT_EQ(state_dict(*copy).tensor("weight").sizes(), at::IntArrayRef({6}));
    EXPECT_THAT(error_of([&] { const ForwardScope scope(*copy); }), HasSubstr("neither"));
    const auto second = std::make_shared<CopyableImpl>();
    fully_shard(*second, {.mesh = mesh});
    {
      const at::NoGradGuard no_grad;
      parameters(*model).front().fill_(2);
    }
    load_state_dict(*second, state_dict(*model, {.type = SHARDED}));
    EXPECT_TRUE(state_dict(*second).tensor("weight").eq(2).all().item<bool>());
  });
}

TEST(TorchFunctionsTest, NormsOfThisRanksPartAreThereForTheAsking) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh);
    backward(model);
    const at::Tensor gradient = model->up->weight.grad();
    const double expected = std::sqrt(gradient.square().sum().item<double>());
    EXPECT_NEAR(gradient.clone().norm().item<double>(), expected, 1e-5);
    const at::NoGradGuard no_grad;
    EXPECT_NEAR(gradient.norm().item<double>(), expected, 1e-5);
  });
}

TEST(TorchFunctionsTest, ClipGradNormOfTorchWorksWhereGradientsAreWhole) {
  const auto norm_on = [](int world_size, ShardingStrategy strategy) {
    double norm = 0;
    test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
      Mlp model = sharded_mlp(mesh, strategy);
      backward(model);
      const double own = torch::nn::utils::clip_grad_norm_(model->parameters(), 1e9);
      if (mesh.rank() == 0) norm = own;
    });
    return norm;
  };
  EXPECT_NEAR(norm_on(1, FULL_SHARD), norm_on(2, NO_SHARD), 1e-5);
}

TEST(TorchFunctionsTest, TorchSaveOfPartsIsRefusedByName) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh);
    std::ostringstream file;
    const auto refuses = AllOf(HasSubstr("weight: torch::save: expected a whole tensor"),
                               HasSubstr("tessera::save"));
    EXPECT_THAT(error_of([&] { torch::save(model, file); }), refuses);
    EXPECT_THAT(error_of([&] { torch::save(model->up->weight, file); }), HasSubstr("up.weight: "));
    EXPECT_THAT(error_of([&] { torch::save(model->parameters(), file); }), refuses);
    {
      const ForwardScope pass(*model);
      EXPECT_THAT(error_of([&] { torch::save(model->up->weight, file); }), refuses);
    }
    backward(model);
  });
}

TEST(TorchFunctionsTest, TorchSaveWorksWhereTensorsAreWhole) {
  for (const int world_size : {1, 2}) {
    test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
      Mlp model = sharded_mlp(mesh, world_size == 1 ? FULL_SHARD : NO_SHARD);
      std::stringstream file;
      torch::save(model, file);
      Mlp loaded;
      torch::load(loaded, file);
      EXPECT_TRUE(torch::equal(loaded->up->weight, seeded<Mlp>()->up->weight));
    });
  }
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh);
    std::stringstream file;
    {
      const auto whole = unshard_params(*model);
      torch::save(model->up->weight.clone(), file);
      std::stringstream all;
      torch::save(model, all);
    }
    at::Tensor loaded;
    torch::load(loaded, file);
    EXPECT_TRUE(torch::equal(loaded, seeded<Mlp>()->up->weight));
    std::stringstream dict;
    const StateDict state = state_dict(*model, {.type = FULL});
    torch::save(state.tensor("up.weight"), dict);
  });
}

}  // namespace
}  // namespace tessera
