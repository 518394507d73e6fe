#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

using test::error_of;
using test::Mlp;
using test::seeded;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Shows B21.
TEST(InitializationTest, AMetaModelIsGivenMemoryUnitByUnit) {
  test::on_ranks(3, [](const dist::Mesh& mesh) {
    Mlp model = on_meta_device([] { return Mlp(); });
    EXPECT_TRUE(model->up->weight.is_meta());
    const auto before = model->named_parameters();
    std::vector<std::string> names;
    fully_shard(*model, {.mesh = mesh,
                         .policy = ModuleWrapPolicy<torch::nn::Linear>(),
                         .param_init_fn = [&](torch::nn::Module& module) {
                           names.push_back(module.name());
                           for (at::Tensor& parameter : module.parameters(false)) {
                             EXPECT_TRUE(parameter.device().is_cpu());
                             parameter.fill_(0.25);
                           }
                           // The units before this one are shards by now.
                           std::int64_t held = 0;
                           for (const auto& parameter : model->parameters()) {
                             if (!parameter.is_meta()) held += parameter.numel();
                           }
                           EXPECT_LE(held, 7 * 13 + 13 + (13 * 11 + 11) / 3 + (11 * 3 + 3) / 3 + 4);
                         }});
    EXPECT_THAT(names, ElementsAre("torch::nn::LinearImpl", "torch::nn::LinearImpl",
                                   "torch::nn::LinearImpl"));
    for (const auto& parameter : before) {
      EXPECT_TRUE(model->named_parameters()[parameter.key()].is_same(parameter.value()));
    }
    const at::Tensor output = forward(model, torch::ones({1, 7}));
    const double up = 7 * 0.25 + 0.25;
    const double middle = std::tanh(13 * 0.25 * up + 0.25);
    EXPECT_NEAR(output[0][0].item<double>(), 11 * 0.25 * middle + 0.25, 1e-5);
    output.sum().backward();
  });
}

// Shows B21.
TEST(InitializationTest, OnlyRankZeroNeedsValuesWhereStatesAreSynced) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = mesh.rank() == 0 ? seeded<Mlp>() : on_meta_device([] { return Mlp(); });
    fully_shard(*model, {.mesh = mesh,
                         .policy = ModuleWrapPolicy<torch::nn::Linear>(),
                         .param_init_fn = [](torch::nn::Module&) {},
                         .module_states = FullyShardOptions::ModuleStates::sync});
    const at::Tensor x = torch::ones({1, 7});
    EXPECT_TRUE(torch::allclose(forward(model, x), unsharded->forward(x)));
  });
}

// Shows B22.
TEST(InitializationTest, AMetaParameterWithoutAFunctionIsNamed) {
  Mlp model = on_meta_device([] { return Mlp(); });
  EXPECT_THAT(
      error_of([&] { fully_shard(*model, {.policy = ModuleWrapPolicy<torch::nn::Linear>()}); }),
      HasSubstr("down.weight: tensor for fully_shard: expected a tensor with memory, found a "
                "tensor on the meta device"));
}

// Shows B22.
TEST(InitializationTest, MixedDevicesAreNamed) {
  Mlp model;
  Mlp meta = on_meta_device([] { return Mlp(); });
  model->replace_module("down", meta->down);
  EXPECT_THAT(error_of([&] {
                fully_shard(*model,
                            {.param_init_fn = [](torch::nn::Module&) {}, .device = at::kMeta});
              }),
              HasSubstr("down.weight: device: expected cpu, like up.weight, found meta"));
}

// Shows B22.
TEST(InitializationTest, AnOptimizerFromBeforeShardingIsNamed) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    torch::optim::Adam optimizer(model->parameters());
    model->forward(torch::ones({1, 7})).sum().backward();
    optimizer.step();
    EXPECT_THAT(
        error_of([&] { fully_shard(*model, {.mesh = mesh}); }),
        HasSubstr("up.weight: parameter for fully_shard: expected a parameter without a gradient"));
  });
}

// Shows B18.
TEST(InitializationTest, AnOptimizerThatHasNotSteppedMayBeBuiltBefore) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    torch::optim::Adam optimizer(model->parameters());
    fully_shard(*model, {.mesh = mesh});
    const at::Tensor before = forward(model, torch::ones({1, 7}));
    before.sum().backward();
    optimizer.step();
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(torch::allclose(forward(model, torch::ones({1, 7})), before));
  });
}

// Shows B21.
TEST(InitializationTest, CpuOffloadTrainsTheSame) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = seeded<Mlp>();
    fully_shard(*model, {.mesh = mesh,
                         .policy = ModuleWrapPolicy<torch::nn::Linear>(),
                         .offload = Offload::params});
    unsharded->forward(torch::ones({2, 7})).sum().backward();
    forward(model, torch::ones({2, 7})).sum().backward();
    test::expect_gradients_of(*unsharded, *model, mesh);
    for (const at::Tensor& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.device().is_cpu());
    }
  });
}

// Shows B11.
TEST(InitializationTest, BuffersTakeTheirDtype) {
  test::on_ranks(1, [](const dist::Mesh&) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    fully_shard(*model, {.policy = ModuleWrapPolicy<torch::nn::Linear>(),
                         .mixed_precision = {.buffer_dtype = torch::kDouble}});
    const auto norm = model[1]->as<torch::nn::BatchNorm1d>();
    EXPECT_EQ(norm->running_mean.scalar_type(), torch::kDouble);
    EXPECT_EQ(norm->num_batches_tracked.scalar_type(), torch::kLong);
  });
}

}  // namespace
}  // namespace tessera
