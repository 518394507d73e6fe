#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>

#include "runtime/support/checks.h"
#include "runtime/support/models.h"
#include "runtime/support/ranks.h"
#include "tessera/base/error.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::Block;
using test::error_of;
using test::expect_same;
using test::gradients;
using test::Mlp;
using test::seeded;
using test::sharded_transformer;
using test::some_ids;
using test::Transformer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Shows B4, B17.
TEST(PassTest, GathersAndReducesInTheExpectedOrder) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = seeded<Transformer>();
    fully_shard(*model, {.mesh = mesh,
                         .policy = ModuleWrapPolicy<Block>(),
                         .backward_prefetch = BackwardPrefetch::none});
    for (int step = 0; step < 3; ++step) {
      forward(model, some_ids()).sum().backward();
      EXPECT_THAT(
          recorded_order(*model),
          ElementsAre("unshard the root", "unshard blocks.0", "unshard blocks.1",
                      "unshard blocks.2", "unshard blocks.2", "reduce blocks.2", "unshard blocks.1",
                      "reduce blocks.1", "unshard blocks.0", "reduce blocks.0", "reduce the root"));
    }
  });
}

// Shows B3.
TEST(PassTest, FlatParametersAreInTheOrderOfTheTree) {
  test::on_ranks(3, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    const std::vector<FlatParameterInfo> infos = handles(*model);
    ASSERT_EQ(infos.size(), 4U);
    EXPECT_EQ(infos[0].module_fqn, "");
    EXPECT_EQ(infos[3].module_fqn, "blocks.2");
    ASSERT_EQ(infos[0].parameters.size(), 3U);
    EXPECT_EQ(infos[0].parameters[0].fqn, "embedding.weight");
    EXPECT_EQ(infos[0].parameters[1].fqn, "norm.weight");
    EXPECT_EQ(infos[0].parameters[1].offset, 192);  // 190, at the next 16 bytes
    EXPECT_EQ(infos[0].shared,
              (std::map<std::string, std::string>{{"head.weight", "embedding.weight"}}));
    EXPECT_EQ(infos[0].parameters[2].offset, 204);
    EXPECT_EQ(infos[0].unpadded_numel, 214);
    EXPECT_EQ(infos[0].sharded_numel, 72);
    const auto modules = fsdp_modules(*model);
    ASSERT_EQ(modules.size(), 4U);
    EXPECT_EQ(modules[1].first, "blocks.0");
    EXPECT_EQ(modules[0].second.get(), model.get());
  });
}

// Shows B18.
TEST(PassTest, ParametersKeepTheirTensorsAndNames) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = seeded<Transformer>();
    const auto before = model->named_parameters();
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<Block>()});
    const auto check = [&] {
      const auto after = model->named_parameters();
      ASSERT_EQ(after.size(), before.size());
      for (const auto& parameter : before) {
        EXPECT_TRUE(after[parameter.key()].is_same(parameter.value())) << parameter.key();
      }
    };
    check();
    forward(model, some_ids()).sum().backward();
    check();
    EXPECT_EQ(model->blocks[0]->as<Block>()->up->weight.dim(), 1);
  });
}

TEST(PassTest, AnEvaluationBetweenStepsEndsByItself) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    forward(model, some_ids()).sum().backward();
    const std::vector<at::Tensor> expected = gradients(*model);
    {
      const at::NoGradGuard no_grad;
      static_cast<void>(forward(model, some_ids()));
    }
    EXPECT_EQ(model->norm->weight.grad().sizes(), model->norm->weight.sizes());
    for (const FlatParameterInfo& info : handles(*model)) EXPECT_FALSE(info.is_unsharded);
    expect_same(gradients(*model), expected);
  });
}

TEST(PassTest, TwoForwardsThenOneBackward) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    forward(model, some_ids()).sum().backward();
    const std::vector<at::Tensor> once = gradients(*model);
    for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    (forward(model, some_ids()).sum() + forward(model, some_ids()).sum()).backward();
    expect_same(gradients(*model), once, 2);
  });
}

// Shows B11.
TEST(PassTest, AutocastKeepsNoCopyOfAWeightFromOnePassToTheNext) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    // Not Linear: it uses a view of its weight, and autocast caches no copies of views.
    torch::nn::Conv1d model(torch::nn::Conv1dOptions(3, 4, 1));
    fully_shard(*model, {.mesh = mesh});
    const test::AutocastToBFloat16 autocast;  // over several steps, as in some trainers
    const at::Tensor input = torch::ones({2, 3, 5});
    const at::Tensor before = forward(model, input);
    before.sum().backward();
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.mul_(0.5);
    }
    const at::Tensor after = forward(model, input);
    EXPECT_TRUE(torch::allclose(after, before * 0.5, 1e-2, 1e-2)) << after << before;
    after.sum().backward();
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  });
}

TEST(PassTest, GradientsAddUpOverBackwards) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    forward(model, some_ids()).sum().backward();
    const std::vector<at::Tensor> once = gradients(*model);
    forward(model, some_ids()).sum().backward();
    expect_same(gradients(*model), once, 2);
  });
}

// Shows B21.
TEST(PassTest, NoSyncAddsUpWithoutCommunication) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    forward(model, some_ids()).sum().backward();
    const std::vector<at::Tensor> once = gradients(*model);
    for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    const std::uint64_t before = mesh.world()->traffic().reduce_scatter;
    {
      const NoSyncScope no_sync(*model);
      forward(model, some_ids()).sum().backward();
      forward(model, some_ids()).sum().backward();
    }
    EXPECT_EQ(mesh.world()->traffic().reduce_scatter, before);
    EXPECT_FALSE(model->norm->weight.grad().defined());
    forward(model, some_ids()).sum().backward();
    expect_same(gradients(*model), once, 3);
  });
}

TEST(PassTest, ASecondBackwardThroughARetainedGraph) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    const at::Tensor loss = forward(model, some_ids()).sum();
    loss.backward({}, /*retain_graph=*/true);
    const std::vector<at::Tensor> once = gradients(*model);
    loss.backward();
    expect_same(gradients(*model), once, 2);
  });
}

TEST(PassTest, AnExceptionInTheForwardLeavesShards) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    EXPECT_THAT(error_of([&] {
                  forward(model, torch::full({1, 1}, 1000, torch::kLong));
                }),
                HasSubstr("index out of range"));
    EXPECT_EQ(model->norm->weight.dim(), 1);
    for (const FlatParameterInfo& info : handles(*model)) EXPECT_FALSE(info.is_unsharded);
    forward(model, some_ids()).sum().backward();
    EXPECT_TRUE(model->norm->bias.grad().defined());
  });
}

TEST(PassTest, AnExceptionInTheBackwardIsForgottenByTheNextForward) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    forward(model, some_ids()).sum().backward();
    const std::vector<at::Tensor> once = gradients(*model);
    for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    at::Tensor logits = forward(model, some_ids());
    const at::Tensor hooked = logits * 1;
    hooked.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("boom"); });
    const at::Tensor loss = hooked.sum() + logits.sum();
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("boom"));
    forward(model, some_ids()).sum().backward();
    expect_same(gradients(*model), once);
  });
}

// Shows B22.
TEST(PassTest, AWriteDuringAPassIsNamed) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded_transformer(mesh);
    EXPECT_THAT(error_of([&] {
                  const at::NoGradGuard no_grad;
                  const ForwardScope scope(*model);
                  model->norm->weight.clamp_(0, 1);
                }),
                HasSubstr("norm.weight: parameter of a fully sharded module: expected no write"));
  });
}

// Shows B22.
TEST(PassTest, AConvertedModuleIsNamed) {
  test::on_ranks(1, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    fully_shard(*model, {.mesh = mesh});
    model->to(torch::kDouble);
    EXPECT_THAT(error_of([&] {
                  forward(model, torch::ones({1, 7}, torch::kDouble));
                }),
                HasSubstr("up.weight: parameter of a fully sharded module"));
  });
}

// Shows B22.
TEST(PassTest, ASparseGradientIsNamed) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    auto model =
        std::make_shared<torch::nn::EmbeddingImpl>(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    fully_shard(*model, {.mesh = mesh});
    const at::Tensor loss = forward(model, torch::tensor({1, 2})).sum();
    EXPECT_THAT(
        error_of([&] { loss.backward(); }),
        HasSubstr("weight: parameter of a fully sharded module: expected a dense gradient"));
  });
}

// Shows B22.
TEST(PassTest, TwiceShardedAndNothingShardedAreErrors) {
  Mlp model;
  EXPECT_THAT(error_of([&] { forward(model, torch::ones({1, 7})); }), HasSubstr("fully_shard"));
  fully_shard(*model);
  EXPECT_THAT(error_of([&] { fully_shard(*model); }),
              HasSubstr("expected a module that is not sharded or replicated yet, found a module "
                        "that fully_shard was applied to"));
  torch::nn::LinearImpl on_stack(2, 2);
  EXPECT_THAT(error_of([&] { fully_shard(on_stack); }), HasSubstr("shared_ptr"));
}

// Shows B11.
TEST(PassTest, ComputesInBfloat16AndKeepsFloatParameters) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    fully_shard(*model, {.mesh = mesh,
                         .policy = ModuleWrapPolicy<torch::nn::Linear>(),
                         .mixed_precision = {.param_dtype = torch::kBFloat16}});
    const at::Tensor output = forward(model, torch::ones({2, 7}));
    EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
    output.sum().backward();
    for (const auto& parameter : model->named_parameters()) {
      EXPECT_EQ(parameter.value().scalar_type(), torch::kFloat) << parameter.key();
      if (parameter.value().numel() > 0) {
        EXPECT_EQ(parameter.value().grad().scalar_type(), torch::kFloat) << parameter.key();
      }
    }
  });
}

// Shows B21.
TEST(PassTest, IgnoredStatesAreLeftAlone) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    fully_shard(*model, {.mesh = mesh,
                         .ignored_modules = {model->down.ptr()},
                         .ignored_states = {model->up->bias}});
    EXPECT_EQ(model->down->weight.dim(), 2);
    EXPECT_EQ(model->up->bias.numel(), 13);
    EXPECT_EQ(handles(*model).at(0).parameters.size(), 3U);
    forward(model, torch::ones({2, 7})).sum().backward();
    EXPECT_EQ(model->down->weight.grad().sizes(), model->down->weight.sizes());
  });
}

// Shows B21.
TEST(PassTest, AllRanksClipByOneNormAlsoWithIgnoredParameters) {
  for (const double norm_type : {2.0, std::numeric_limits<double>::infinity()}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Mlp model = seeded<Mlp>();
      fully_shard(*model, {.mesh = mesh, .ignored_modules = {model->down.ptr()}});
      forward(model, torch::ones({2, 7})).sum().backward();
      model->down->weight.mutable_grad().mul_(100 * (1 + mesh.rank()));  // not averaged
      const std::vector<at::Tensor> before = test::gradients(*model);
      const double norm = clip_grad_norm_(*model, 1, norm_type);
      EXPECT_EQ(norm, mesh.world()->max(norm, "of all ranks"));
      const double of_largest =
          mesh.world()->max(at::linalg_vector_norm(before[4], norm_type).item<double>(), "largest");
      EXPECT_NEAR(norm / of_largest, 1, 0.1);
      test::expect_same(test::gradients(*model), before, 1 / norm);
    });
  }
}

// Shows B20.
TEST(PassTest, SyncGivesEveryRankTheStatesOfRankZero) {
  test::on_ranks(3, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.fill_(mesh.rank() + 1);
    }
    fully_shard(*model, {.mesh = mesh, .module_states = FullyShardOptions::ModuleStates::sync});
    const at::NoGradGuard no_grad;
    const ForwardScope scope(*model);
    for (const auto& parameter : model->named_parameters()) {
      EXPECT_TRUE(parameter.value().eq(1).all().item<bool>()) << parameter.key();
    }
    EXPECT_EQ(mesh.world()->traffic().broadcast,
              (7 * 13 + 13 + 13 * 11 + 11 + 11 * 3 + 3) * sizeof(float));
  });
}

}  // namespace
}  // namespace tessera
