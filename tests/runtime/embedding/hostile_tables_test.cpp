#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <optional>

#include "runtime/embedding/initial_weight.h"
#include "runtime/embedding/tables.h"
#include "runtime/support/checks.h"
#include "tessera/base/error.h"
#include "tessera/runtime/embedding/input_pipeline.h"
#include "tessera/runtime/fsdp/fully_shard.h"
#include "tessera/runtime/replicate/replicate.h"
#include "tessera/runtime/state/optim_state_dict.h"

// Shows D2, D5, D7, D8. Initial values, and misuse that must not lead to a wrong row, a crash or a
// rank that hangs.

namespace tessera {
namespace {

using embedding::RowWiseAdagrad;
using embedding::Sgd;
using test::error_of;
using test::sharded_collection;
using testing::HasSubstr;

TablePlan plan(const std::string& kind, int world_size) {
  return test::plan_of(test::plan_kind(kind), world_size);
}

KeyedJaggedTensor ids_of(std::vector<std::int64_t> ids) {
  return KeyedJaggedTensor::from_lengths(
      {"user", "item", "city", "day"}, torch::tensor(ids, at::kLong), torch::ones({4}, at::kLong));
}

EmbeddingBagConfig table(const std::string& name, std::int64_t rows, std::int64_t columns) {
  EmbeddingBagConfig config;
  config.name = name;
  config.num_embeddings = rows;
  config.embedding_dim = columns;
  config.feature_names = {"f"};
  return config;
}

at::Tensor first_values(const EmbeddingBagConfig& config, const Box& region, std::uint64_t seed) {
  at::Tensor weight = torch::empty(region.sizes, config.dtype);
  embedding::initialize_shard(config, region, seed, weight);
  return weight;
}

// Shows D2.
TEST(FirstValuesTest, ATableBeginsTheSameHoweverItIsCut) {
  const EmbeddingBagConfig config = table("t", 3000, 7);
  const at::Tensor whole = first_values(config, {{0, 0}, {3000, 7}}, 5);
  const double bound = 1 / std::sqrt(3000.0);
  EXPECT_LE(whole.abs().max().item<double>(), bound);
  EXPECT_NEAR(whole.mean().item<double>(), 0, bound / 50);
  EXPECT_NEAR(whole.std().item<double>(), bound / std::sqrt(3.0), bound / 50);
  for (const Box& region : {Box{{0, 0}, {1500, 7}}, Box{{1500, 0}, {1500, 7}},
                            Box{{0, 3}, {3000, 4}}, Box{{2047, 2}, {3, 1}}, Box{{4, 0}, {0, 7}}}) {
    const at::Tensor cut = whole.narrow(0, region.offsets[0], region.sizes[0])
                               .narrow(1, region.offsets[1], region.sizes[1]);
    EXPECT_TRUE(torch::equal(first_values(config, region, 5), cut));
  }
  EXPECT_FALSE(torch::equal(first_values(config, {{0, 0}, {3000, 7}}, 6), whole));
  EXPECT_FALSE(torch::equal(first_values(table("u", 3000, 7), {{0, 0}, {3000, 7}}, 5), whole));
}

// Shows D2.
TEST(FirstValuesTest, AnInitFnMakesReplicasEqualAndShardsNot) {
  EmbeddingBagConfig config = table("t", 8, 2);
  config.init_fn = [](at::Tensor weight) { weight.normal_(); };
  torch::manual_seed(3);
  const at::Tensor upper = first_values(config, {{0, 0}, {4, 2}}, 5);
  EXPECT_TRUE(torch::equal(first_values(config, {{0, 0}, {4, 2}}, 5), upper));
  EXPECT_FALSE(torch::equal(first_values(config, {{4, 0}, {4, 2}}, 5), upper));
  const at::Tensor behind = torch::rand({1});
  torch::manual_seed(3);
  EXPECT_TRUE(torch::equal(torch::rand({1}), behind)) << "the generator is as it was";
}

// Shows D2.
TEST(FirstValuesTest, ReplicasOfTablesWithoutMemoryAreEqual) {
  const EmbeddingBagCollection tables(test::small_tables(), {.device = at::kMeta});
  test::on_ranks(3, [&](const dist::Mesh& mesh) {
    const auto made = shard(tables, plan("data_parallel", 3), mesh);
    for (const EmbeddingBagConfig& config : tables.tables().configs()) {
      at::Tensor other = made->weight(config.name).detach().clone();
      mesh.world()->broadcast(other, 0, "a table").wait();
      EXPECT_TRUE(torch::equal(made->weight(config.name), other)) << config.name;
      EXPECT_GT(other.abs().sum().item<float>(), 0);
    }
  });
}

// Shows D8.
TEST(HostileTablesTest, AnInputIsOneCollectionsAndForOnce) {
  const dist::Mesh alone;
  const auto tables = sharded_collection(alone, "table_wise");
  const auto others = sharded_collection(alone, "table_wise");
  EXPECT_THAT(error_of([&] {
                others->forward(tables->distribute(ids_of({1, 1, 1, 1})));
              }),
              HasSubstr("an input of another collection"));
  DistributedInput input = tables->distribute(ids_of({1, 1, 1, 1}));
  DistributedInput copy = input;
  tables->forward(std::move(input));
  EXPECT_THAT(error_of([&] { tables->forward(copy); }), HasSubstr("an input that was used before"));
  EXPECT_THAT(error_of([&] { tables->forward(std::move(input)); }), HasSubstr("moved from"));
  EXPECT_THAT(error_of([&] { input.advance(); }), HasSubstr("moved from"));
}

// Shows D8.
TEST(HostileTablesTest, ARefusedInputIsRefusedEachTime) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto tables = sharded_collection(mesh, "row_wise");
    DistributedInput input = tables->distribute(ids_of({1, 1, mesh.rank() == 0 ? 99 : 1, 1}));
    const std::string expected = mesh.rank() == 0 ? "found id 99" : "an invalid batch on rank 0";
    EXPECT_THAT(error_of([&] { input.advance(); }), HasSubstr(expected));
    EXPECT_THAT(error_of([&] { input.advance(); }), HasSubstr(expected));
    EXPECT_THAT(error_of([&] { tables->forward(input); }), HasSubstr(expected));
  });
}

// Shows D8.
TEST(HostileTablesTest, ABatchIsTakenWhenItIsDistributed) {
  const dist::Mesh alone;
  const auto tables = sharded_collection(alone, "table_wise");
  const at::Tensor ids = torch::tensor({1, 1, 1, 1}, at::kLong);
  const at::Tensor lengths = torch::ones({4}, at::kLong);
  const auto batch = KeyedJaggedTensor::from_lengths({"user", "item", "city", "day"}, ids, lengths);
  const at::Tensor expected = tables->forward(batch).values().detach();
  lengths.fill_(1'000'000);
  EXPECT_TRUE(torch::equal(tables->forward(batch).values(), expected));
  DistributedInput input = tables->distribute(batch);
  ids.fill_(1'000'000'000);
  EXPECT_TRUE(torch::equal(tables->forward(std::move(input)).values(), expected));
}

// Shows D7.
TEST(HostileTablesTest, RanksThatDifferAreToldSo) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto refusal_with = [&](const TablePlan& rules, const ShardOptions& options,
                                  bool is_frozen) {
      const auto tables = shard(test::small_collection(), rules, mesh, options);
      tables->weight("users").requires_grad_(!is_frozen);
      return error_of([&] { tables->forward(test::small_batch(mesh.rank(), 0)); });
    };
    const ShardOptions same{.optimizer = Sgd{.lr = 0.1}};
    const auto told = HasSubstr("expected the same tables, plan, kernels and optimizer");
    const std::string rules = mesh.rank() == 0 ? "row_wise" : "column_wise";
    EXPECT_THAT(refusal_with(plan(rules, 2), same, false), told);
    ShardOptions other = same;
    if (mesh.rank() == 1) other.optimizer = RowWiseAdagrad{.lr = 0.1};
    EXPECT_THAT(refusal_with(plan("row_wise", 2), other, false), told);
    EXPECT_THAT(refusal_with(plan("row_wise", 2), same, mesh.rank() == 1), told);
    EXPECT_EQ(refusal_with(plan("row_wise", 2), same, true), "none");
  });
}

// Shows D7.
TEST(HostileTablesTest, RulesMadeInCodeAreChecked) {
  const dist::Mesh alone;
  const auto refusal_with = [&](const TableRule& rule) {
    TablePlan rules = plan("table_wise", 1);
    rules.tables["days"] = rule;
    return error_of([&] { shard(test::small_collection(), rules, alone); });
  };
  EXPECT_THAT(refusal_with({}), HasSubstr("ranks in the rule of a table: expected one or more"));
  EXPECT_THAT(refusal_with({TableSharding::row_wise, {0, 0}}), HasSubstr("0 twice"));
  EXPECT_THAT(refusal_with({TableSharding::column_wise, {}}), HasSubstr("one or more"));
  EXPECT_THAT(refusal_with({TableSharding::grid, {0}, 0}), HasSubstr("column_shards"));
  EXPECT_THAT(refusal_with({TableSharding::grid, {0}, 3}), HasSubstr("column_shards"));
}

// Shows D8.
TEST(HostileTablesTest, OneRankAloneMayWantGradientsOfItsWeights) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto tables = shard(test::small_collection({.is_weighted = true}), plan("row_wise", 2),
                              mesh, {.optimizer = Sgd{.lr = 0.1}});
    const at::Tensor weights = torch::ones({4}).requires_grad_(mesh.rank() == 0);
    const auto batch = mesh.rank() == 0
                           ? KeyedJaggedTensor::from_lengths({"user", "item", "city", "day"},
                                                             torch::tensor({1, 1, 1, 1}, at::kLong),
                                                             torch::ones({4}, at::kLong), weights)
                           : KeyedJaggedTensor::empty({"user", "item", "city", "day"}, 2);
    tables->forward(batch).values().sum().backward();
    EXPECT_EQ(weights.grad().defined(), mesh.rank() == 0);
    EXPECT_EQ(tables->forward(batch).values().size(0), mesh.rank() == 0 ? 1 : 2);
  });
}

// Shows D8.
TEST(HostileTablesTest, OneRankAloneMayWantGradientsOfItsWeightsOfFrozenTables) {
  const dist::MeshOptions soon{.timeout = std::chrono::seconds(20)};
  test::on_ranks(
      2,
      [](const dist::Mesh& mesh) {
        const auto collection = test::small_collection({.is_weighted = true});
        for (const at::Tensor& weight : collection.parameters()) weight.requires_grad_(false);
        const auto tables = shard(collection, plan("row_wise", 2), mesh);
        const at::Tensor weights = torch::ones({4}).requires_grad_(mesh.rank() == 0);
        const auto batch =
            mesh.rank() == 0
                ? KeyedJaggedTensor::from_lengths({"user", "item", "city", "day"},
                                                  torch::tensor({1, 1, 1, 1}, at::kLong),
                                                  torch::ones({4}, at::kLong), weights)
                : KeyedJaggedTensor::empty({"user", "item", "city", "day"}, 2);
        tables->forward(batch).values().sum().backward();
        ASSERT_EQ(weights.grad().defined(), mesh.rank() == 0);
        if (mesh.rank() != 0) return;
        EXPECT_GT(weights.grad().abs().min().item<float>(), 0);
      },
      soon);
}

// Shows D8.
TEST(HostileTablesTest, WeightsGetGradientsIfTheBatchWasDistributedUnderNoGradGuard) {
  const dist::Mesh alone;
  const auto tables = shard(test::small_collection({.is_weighted = true}), plan("table_wise", 1),
                            alone, {.optimizer = Sgd{.lr = 0.1}});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {  // double ones are converted
    const at::Tensor weights = torch::ones({4}, dtype).requires_grad_();
    const auto batch = KeyedJaggedTensor::from_lengths({"user", "item", "city", "day"},
                                                       torch::tensor({1, 1, 1, 1}, at::kLong),
                                                       torch::ones({4}, at::kLong), weights);
    std::optional<DistributedInput> input;
    {
      const at::NoGradGuard no_grad;
      input = tables->distribute(batch);
    }
    tables->forward(std::move(*input)).values().sum().backward();
    ASSERT_TRUE(weights.grad().defined()) << dtype;
    EXPECT_GT(weights.grad().abs().min().item<double>(), 0) << dtype;
  }
}

// Shows D9.
TEST(HostileTablesTest, ABackwardForOneTableMovesNoOther) {
  for (const std::string kind : {"table_wise", "column_wise", "data_parallel"}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      const auto tables = sharded_collection(
          mesh, kind,
          {.kernel = {{"users", Kernel::dense}}, .optimizer = RowWiseAdagrad{.lr = 0.1}});
      const auto weights_now = [&] {
        std::vector<at::Tensor> weights;
        for (const at::Tensor& weight : tables->parameters()) {
          weights.push_back(weight.detach().clone());
        }
        return weights;
      };
      const auto batch = test::small_batch(mesh.rank() * 2, 0);
      const std::vector<at::Tensor> before = weights_now();
      const auto loss = test::loss_of(tables->forward(batch).values());
      const auto gradients = torch::autograd::grad({loss}, {tables->weight("users")});
      EXPECT_TRUE(gradients.front().defined());
      test::expect_same(weights_now(), before);
      // A backward for all tensors moves the fused tables.
      const at::Tensor days = tables->weight("days").detach().clone();
      test::loss_of(tables->forward(batch).values()).backward();
      EXPECT_TRUE(days.numel() == 0 || !torch::equal(tables->weight("days"), days)) << kind;
    });
  }
}

// Shows D9.
TEST(HostileTablesTest, ShardingFusedTablesKeepsTheirOptimizerState) {
  for (const embedding::FusedOptimizer& optimizer : test::fused_optimizers()) {
    for (const std::string kind : {"row_wise", "column_wise", "mixed", "data_parallel"}) {
      test::on_ranks(2, [&](const dist::Mesh& mesh) {
        at::set_num_threads(1);
        FusedEmbeddingBagCollection fused(test::small_tables(), optimizer);
        const auto copy = test::small_collection();
        const at::NoGradGuard no_grad;
        for (const EmbeddingBagConfig& config : fused.tables().configs()) {
          fused.weight(config.name).copy_(copy.weight(config.name));
        }
        const auto train = [&](EmbeddingBagCollectionBase& tables, const KeyedJaggedTensor& batch,
                               double factor) {
          const at::AutoGradMode with_gradients(true);
          (tables.forward(batch).values().square().sum() * factor).backward();
        };
        train(fused, test::small_batch(2, 0), 1);
        const auto tables = shard(fused, plan(kind, 2), mesh, ShardOptions{.optimizer = optimizer});
        train(fused, test::joined({test::small_batch(0, 1), test::small_batch(1, 1)}), 0.5);
        train(*tables, test::small_batch(mesh.rank(), 1), 1);
        StateDict whole = optim_state_dict(*tables);
        const auto expected = std::make_shared<FusedEmbeddingBagCollection>(std::move(fused));
        for (const StateDict::Item& item : optim_state_dict(*expected)) {
          if (!std::holds_alternative<StateTensor>(item.entry)) continue;
          EXPECT_TRUE(torch::allclose(whole.tensor(item.fqn),
                                      std::get<StateTensor>(item.entry).tensor(item.fqn), 1e-4,
                                      1e-6))
              << kind << ": " << item.fqn;
        }
      });
    }
  }
}

// Shows D9.
TEST(HostileTablesTest, StateOfFusedTablesIsNotDroppedForAnotherOptimizer) {
  const dist::Mesh alone;
  FusedEmbeddingBagCollection fused(test::small_tables(), RowWiseAdagrad{.lr = 0.1});
  const auto refusal_with = [&](const ShardOptions& options) {
    return error_of([&] { shard(fused, plan("table_wise", 1), alone, options); });
  };
  EXPECT_EQ(refusal_with({}), "none") << "no step has been taken yet";
  test::loss_of(fused.forward(test::small_batch(0, 0)).values()).backward();
  EXPECT_THAT(refusal_with({}),
              testing::AllOf(HasSubstr("users: optimizer of a table"), HasSubstr("row_sum"),
                             HasSubstr("the dense kernel")));
  EXPECT_THAT(refusal_with({.optimizer = embedding::Adam{}}), HasSubstr("another kind"));
  EXPECT_EQ(refusal_with({.optimizer = RowWiseAdagrad{.lr = 0.01}}), "none");
}

// Shows D8.
TEST(HostileTablesTest, GradientsOfWeightsAloneMoveNoTable) {
  const dist::Mesh alone;
  const auto tables = shard(test::small_collection({.is_weighted = true}), plan("table_wise", 1),
                            alone, {.optimizer = Sgd{.lr = 0.1}});
  const at::Tensor weights = torch::ones({4}).requires_grad_();
  const auto batch = KeyedJaggedTensor::from_lengths({"user", "item", "city", "day"},
                                                     torch::tensor({1, 1, 1, 1}, at::kLong),
                                                     torch::ones({4}, at::kLong), weights);
  const at::Tensor before = tables->weight("users").detach().clone();
  const auto loss = tables->forward(batch).values().sum();
  EXPECT_GT(torch::autograd::grad({loss}, {weights}).front().abs().sum().item<float>(), 0);
  EXPECT_TRUE(torch::equal(tables->weight("users"), before));
}

// Shows D5.
TEST(HostileTablesTest, TablesThatOneRankUpdatesAloneAreRefusedByOthers) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto model = [] {
      return test::model_with(
          std::make_shared<FusedEmbeddingBagCollection>(test::small_tables(), Sgd{.lr = 0.1}));
    };
    EXPECT_THAT(error_of([&] { fully_shard(*model(), {.mesh = mesh}); }),
                HasSubstr("apply tessera::shard to it first"));
    EXPECT_THAT(error_of([&] { replicate(*model(), {.mesh = mesh}); }),
                HasSubstr("apply tessera::shard to it first"));
  });
}

// Shows D6.
TEST(HostileTablesTest, AFrozenTableStaysFrozen) {
  const dist::Mesh alone;
  const auto collection = std::make_shared<EmbeddingBagCollection>(test::small_tables());
  collection->weight("users").requires_grad_(false);
  const auto tables = shard(collection, plan("table_wise", 1), alone, {.optimizer = Sgd{.lr = 1}});
  EXPECT_FALSE(tables->weight("users").requires_grad());
  EXPECT_TRUE(tables->weight("days").requires_grad());
  const at::Tensor before = tables->weight("users").detach().clone();
  test::loss_of(tables->forward(ids_of({1, 1, 1, 1})).values()).backward();
  EXPECT_TRUE(torch::equal(tables->weight("users"), before));
}

// Shows D9.
TEST(HostileTablesTest, TheOptimizersNumbersCanChangeButNotItsKind) {
  const dist::Mesh alone;
  const auto tables = sharded_collection(alone, "table_wise");
  const at::Tensor before = tables->weight("users").detach().clone();
  tables->set_optimizer(RowWiseAdagrad{.lr = 0});
  test::loss_of(tables->forward(ids_of({1, 1, 1, 1})).values()).backward();
  EXPECT_TRUE(torch::equal(tables->weight("users"), before));
  EXPECT_THAT(error_of([&] { tables->set_optimizer(Sgd{}); }), HasSubstr("row_wise_adagrad"));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(error_of([&] { tables->set_optimizer(RowWiseAdagrad{.lr = nan}); }),
              HasSubstr("0 or more"));
  EXPECT_THAT(error_of([&] {
                FusedEmbeddingBagCollection(test::small_tables(), embedding::Adam{.beta1 = 1});
              }),
              HasSubstr("beta1"));
}

// Shows D8.
TEST(HostileTablesTest, ABatchThatOneRankCannotReadIsAnErrorOnAllAndTheNextOnesPass) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto tables = sharded_collection(mesh, "row_wise");
    int next = 0;
    InputPipeline<int> batches(
        tables,
        [&]() -> std::optional<int> { return next < 4 ? std::optional(next++) : std::nullopt; },
        [&](const int& step) {
          if (step == 1 && mesh.rank() == 0) throw std::runtime_error("a torn record");
          return test::small_batch(mesh.rank(), step);
        });
    std::vector<std::string> said;
    while (auto item = batches.next()) {
      said.push_back(error_of([&] { tables->forward(std::move(item->input)); }));
    }
    ASSERT_EQ(said.size(), 4);
    EXPECT_THAT(said[1],
                HasSubstr(mesh.rank() == 0 ? "a torn record" : "an invalid batch on rank 0"));
    for (const std::size_t step : {0U, 2U, 3U}) EXPECT_EQ(said[step], "none") << step;
  });
}

// Shows D8.
TEST(HostileTablesTest, TablesDoNotAskForADefaultDtype) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const dist::Mesh alone;
  const auto tables = sharded_collection(alone, "table_wise");
  const at::Tensor pooled = tables->forward(ids_of({1, 1, 1, 1})).values();
  EXPECT_EQ(pooled.scalar_type(), at::kFloat);
  EXPECT_EQ(error_of([&] { pooled.sum().backward(); }), "none");
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
}

// Shows D4.
TEST(HostileTablesTest, OutputsHaveNamesOfTheirOwn) {
  EmbeddingBagConfig first = table("a", 3, 2), second = table("b", 3, 2), third = table("c", 3, 2);
  third.feature_names = {"f@a"};
  EXPECT_THAT(error_of([&] {
                EmbeddingBagCollection({first, second, third});
              }),
              HasSubstr("'f@a' twice"));
}

// Shows D7.
TEST(HostileTablesTest, WhatIsShardedTakesWholeTablesAndKeepsItsMemory) {
  const dist::Mesh alone;
  const auto tables = sharded_collection(alone, "table_wise");
  EXPECT_THAT(error_of([&] { shard(*tables, plan("table_wise", 1), alone); }),
              HasSubstr("expected whole tables"));
  tables->weight("users").set_data(torch::zeros({2, 2}));
  EXPECT_THAT(error_of([&] {
                tables->forward(ids_of({1, 1, 1, 1}));
              }),
              HasSubstr("weight of a table"));
}

}  // namespace
}  // namespace tessera
