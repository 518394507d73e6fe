#include "tessera/runtime/registry/parameters.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>

#include "runtime/embedding/tables.h"
#include "runtime/support/checks.h"

namespace tessera {
namespace {

using test::on_ranks;
using test::seeded;
using test::Transformer;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;
using torch::optim::AdamWOptions;

/// The customary rule: matrices decay, biases and norms do not.
AdamWOptions decay_matrices(const WholeParameter& parameter) {
  return AdamWOptions(0.01).weight_decay(parameter.dim() >= 2 ? 0.5 : 0);
}

std::vector<std::vector<std::string>> names_of(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const torch::nn::Module& model) {
  std::vector<std::vector<std::string>> names;
  for (const auto& group : groups) {
    std::vector<std::string>& of_group = names.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      for (const auto& each : named_parameters(model)) {
        if (each.value().is_same(parameter)) of_group.push_back(each.key());
      }
    }
  }
  return names;
}

TEST(ParametersTest, ATiedParameterIsListedOnceUnderItsFirstName) {
  Transformer model = seeded<Transformer>();
  EXPECT_THAT(model->named_parameters().keys(), Contains("head.weight"));
  const auto named = named_parameters(*model);
  EXPECT_EQ(named.size(), model->parameters().size() - 1);
  EXPECT_THAT(named.keys(), Not(Contains("head.weight")));
  EXPECT_EQ(named.keys().front(), "embedding.weight");
  const auto listed = parameters(*model);
  ASSERT_EQ(listed.size(), named.size());
  for (std::size_t i = 0; i < listed.size(); ++i) {
    EXPECT_TRUE(listed[i].is_same(named[i].value())) << named[i].key();
  }
}

TEST(ParametersTest, AStepIsThatOfAModelWhoseWeightIsNotListedTwice) {
  const auto stepped_weight = [](Transformer model, std::vector<at::Tensor> parameters) {
    torch::optim::SGD optimizer(std::move(parameters), 0.1);
    model->forward(test::some_ids()).pow(2).sum().backward();
    optimizer.step();
    return model->embedding->weight.detach().clone();
  };
  Transformer once = seeded<Transformer>();
  Transformer as_libtorch = seeded<Transformer>();
  Transformer expected = seeded<Transformer>();
  const at::Tensor weight = stepped_weight(once, parameters(*once));
  EXPECT_TRUE(weight.equal(stepped_weight(expected, test::unique_parameters(*expected))));
  EXPECT_FALSE(weight.equal(stepped_weight(as_libtorch, as_libtorch->parameters())));
}

TEST(ParameterGroupsTest, AreTheSameShardedAndNot) {
  Transformer whole = seeded<Transformer>();
  const auto expected = names_of(parameter_groups(*whole, decay_matrices), *whole);
  ASSERT_EQ(expected.size(), 2U);
  EXPECT_THAT(expected[0], Contains("embedding.weight"));
  EXPECT_THAT(expected[0], Contains("blocks.1.up.weight"));
  EXPECT_THAT(expected[1], Contains("blocks.1.up.bias"));
  EXPECT_THAT(expected[1], Contains("norm.weight"));
  for (const int world_size : {1, 2, 4}) {
    SCOPED_TRACE(world_size);
    on_ranks(world_size, [&](const dist::Mesh& mesh) {
      for (const ShardingStrategy strategy : {FULL_SHARD, NO_SHARD}) {
        Transformer model = seeded<Transformer>();
        fully_shard(
            *model,
            {.mesh = mesh, .policy = ModuleWrapPolicy<test::Block>(), .strategy = strategy});
        const auto groups = parameter_groups(*model, decay_matrices);
        EXPECT_EQ(names_of(groups, *model), expected);
        EXPECT_EQ(static_cast<const AdamWOptions&>(groups[0].options()).weight_decay(), 0.5);
        EXPECT_EQ(static_cast<const AdamWOptions&>(groups[1].options()).weight_decay(), 0);
        const auto found = whole_parameters(*model);
        const auto originals = named_parameters(*whole);
        ASSERT_EQ(found.size(), originals.size());
        for (std::size_t i = 0; i < found.size(); ++i) {
          EXPECT_EQ(found[i].fqn, originals[i].key());
          EXPECT_EQ(at::IntArrayRef(found[i].shape), originals[i].value().sizes());
        }
      }
      Transformer replicated = seeded<Transformer>();
      replicate(*replicated, {.mesh = mesh});
      EXPECT_EQ(names_of(parameter_groups(*replicated, decay_matrices), *replicated), expected);
    });
  }
}

TEST(ParameterGroupsTest, TrainAsTheUnshardedRun) {
  at::set_num_threads(1);  // as ranks do: two threads would add up in another order
  const auto train = [](Transformer model, const auto& run) {
    torch::optim::AdamW optimizer(parameter_groups(*model, decay_matrices));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      run(model, test::some_ids() + step).pow(2).mean().backward();
      optimizer.step();
    }
  };
  Transformer whole = seeded<Transformer>();
  train(whole, [](Transformer& model, const at::Tensor& ids) { return model->forward(ids); });
  for (const int world_size : {1, 2, 4}) {
    SCOPED_TRACE(world_size);
    on_ranks(world_size, [&](const dist::Mesh& mesh) {
      Transformer model = test::sharded_transformer(mesh);
      train(model, [](Transformer& each, const at::Tensor& ids) { return forward(each, ids); });
      const StateDict trained = state_dict(*model);
      for (const auto& each : named_parameters(*whole)) {
        EXPECT_TRUE(trained.tensor(each.key()).equal(each.value())) << each.key();
      }
    });
  }
}

TEST(ParameterGroupsTest, TablesHaveTheirWholeShapesAndFusedOnesNoGroup) {
  const auto names = [](const torch::nn::Module& model) {
    const auto rule = [](const WholeParameter& parameter) {
      return torch::optim::SGDOptions(0.1).weight_decay(parameter.shape[0] >= 12 ? 0.5 : 0);
    };
    return names_of(parameter_groups(model, rule), model);
  };
  const auto expected =
      names(*test::model_with(std::make_shared<EmbeddingBagCollection>(test::small_collection())));
  on_ranks(2, [&](const dist::Mesh& mesh) {
    for (const test::PlanKind& kind : test::plan_kinds()) {
      SCOPED_TRACE(kind.name);
      const auto plan = test::plan_of(kind, mesh.world_size());
      auto model = test::model_with(shard(test::small_collection(), plan, mesh));
      fully_shard(*model, {.mesh = mesh});
      EXPECT_EQ(names(*model), expected);
      auto fused =
          test::model_with(shard(test::small_collection(), plan, mesh,
                                 {.optimizer = embedding::FusedOptimizer(embedding::Sgd{})}));
      fully_shard(*fused, {.mesh = mesh});
      EXPECT_THAT(names(*fused), ElementsAre(ElementsAre("top.weight", "top.bias")));
    }
  });
}

TEST(ParameterGroupsTest, ARuleMayLeaveParametersOut) {
  Transformer model = seeded<Transformer>();
  model->norm->weight.requires_grad_(false);
  model->norm->bias.requires_grad_(false);
  const auto groups =
      parameter_groups(*model, [](const WholeParameter& parameter) -> std::optional<AdamWOptions> {
        if (!parameter.tensor.requires_grad()) return std::nullopt;
        return AdamWOptions(parameter.fqn.starts_with("head") ? 0.1 : 0.01);
      });
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].params().size(), parameters(*model).size() - 2);
  EXPECT_THAT(names_of(groups, *model)[0], Not(Contains("norm.weight")));
  // A rule that leaves nothing out puts the parameter into a group as usual.
  EXPECT_THAT(names_of(parameter_groups(*model, decay_matrices), *model)[1],
              Contains("norm.weight"));
}

}  // namespace
}  // namespace tessera
