#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/embedding/tables.h"
#include "runtime/support/checks.h"
#include "tessera/runtime/embedding/plan_tables.h"
#include "tessera/runtime/state/module_state_dict.h"
#include "tessera/runtime/state/optim_state_dict.h"

// Shows D1, D2, D3, D4, D5, D6. Sharded tables work like any other module.

namespace tessera {
namespace {

using embedding::FusedOptimizer;
using test::sharded_collection;
using testing::ElementsAre;

std::vector<std::string> parameter_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& each : module.named_parameters()) names.push_back(each.key());
  return names;
}

std::vector<std::string> keys_of(const StateDict& state) {
  std::vector<std::string> keys;
  for (const StateDict::Item& item : state) keys.push_back(item.fqn);
  return keys;
}

const auto kNames = ElementsAre("embedding_bags.users.weight", "embedding_bags.cities.weight",
                                "embedding_bags.days.weight", "embedding_bags.again.weight");

// Shows D1, D2, D3, D4.
TEST(ModuleStateTest, NamesAreThoseOfTheUnshardedTablesOnEveryRank) {
  const auto alone = test::small_collection();
  EXPECT_THAT(parameter_names(alone), kNames);
  for (const test::PlanKind& kind : test::plan_kinds()) {
    test::on_ranks(4, [&](const dist::Mesh& mesh) {
      const auto tables = sharded_collection(mesh, kind.name, {.optimizer = embedding::Sgd{}});
      EXPECT_THAT(parameter_names(*tables), kNames) << kind.name;
      EXPECT_TRUE(tables->named_buffers().is_empty());
      EXPECT_THAT(keys_of(state_dict(*tables, {.type = SHARDED})), kNames) << kind.name;
      for (const auto& module : tables->named_modules("", false)) {
        EXPECT_EQ(module.value()->parameters(/*recurse=*/false).size(),
                  module.key().find("embedding_bags.") == 0 ? 1U : 0U)
            << module.key();
      }
    });
  }
}

// Shows D10.
TEST(ModuleStateTest, OnePlanMayBeForTheTablesOfSeveralCollections) {
  const std::vector<EmbeddingBagConfig> all = test::small_tables();
  const std::vector<EmbeddingBagConfig> first(all.begin(), all.begin() + 2);
  const std::vector<EmbeddingBagConfig> others(all.begin() + 2, all.end());
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    const TablePlan plan = embedding::plan(all, mesh, {.memory_per_rank = 1_GiB}).plan;
    for (const auto& tables : {first, others}) {
      const auto collection = std::make_shared<EmbeddingBagCollection>(tables);
      EXPECT_THROW(shard(collection, plan, mesh), Error) << "rules of other tables";
      const auto sharded = shard(collection, embedding::rules_for(plan, tables), mesh);
      EXPECT_EQ(sharded->plan().tables.size(), tables.size());
    }
    const std::uint64_t plain =
        embedding::plan(all, mesh, {.memory_per_rank = 1_GiB}).ranks[0].nbytes;
    const std::uint64_t more =
        embedding::plan(all, mesh, {.memory_per_rank = 1_GiB, .reserved = 1_MiB}).ranks[0].nbytes;
    EXPECT_GE(more, plain + 1_MiB);
    TablePlan less = plan;
    less.tables.erase(others.front().name);
    EXPECT_THAT([&] { embedding::rules_for(less, others); },
                testing::ThrowsMessage<Error>(testing::HasSubstr(others.front().name)));
  });
}

// Shows D4.
TEST(ModuleStateTest, StateDictsAndGlobalMetaHaveWholeShapes) {
  test::on_ranks(3, [](const dist::Mesh& mesh) {
    const auto tables = sharded_collection(mesh, "row_wise", {});
    const StateDict state = state_dict(*tables, {.type = SHARDED});
    const auto& cities = std::get<StateTensor>(*state.find("embedding_bags.cities.weight"));
    EXPECT_EQ(cities.shape, (Shape{3, 5}));
    ASSERT_EQ(cities.local_shards.size(), 1U);
    EXPECT_EQ(numel_of(cities.local_shards[0].region), 5);
    EXPECT_EQ(cities.layout.size(), 3U);
    const auto meta = global_meta(tables->weight("users"));
    ASSERT_TRUE(meta);
    EXPECT_EQ(meta->fqn, "embedding_bags.users.weight");
    EXPECT_EQ(meta->shape, (Shape{11, 8}));
    EXPECT_FALSE(global_meta(torch::zeros({3})));
  });
}

// Shows D4.
TEST(ModuleStateTest, StateDictsLoadIntoEachOther) {
  const auto alone = test::small_collection();
  torch::NoGradGuard no_grad;
  for (const at::Tensor& weight : alone.parameters()) weight.add_(1);
  auto& source = const_cast<EmbeddingBagCollection&>(alone);
  const StateDict whole = state_dict(source);
  for (const test::PlanKind& kind : test::plan_kinds()) {
    test::on_ranks(3, [&](const dist::Mesh& mesh) {
      const auto tables = sharded_collection(mesh, kind.name, {});
      load_state_dict(*tables, whole);
      const StateDict gathered = state_dict(*tables);
      EmbeddingBagCollection again = test::small_collection();
      load_state_dict(again, gathered);
      const auto loaded = again.parameters();
      for (std::size_t i = 0; i < loaded.size(); ++i) {
        EXPECT_TRUE(torch::equal(loaded[i], alone.parameters()[i])) << kind.name;
      }
    });
  }
}

// Shows C2.
TEST(ModuleStateTest, APartIsOnAllRanks) {
  for (const std::string plan : {"data_parallel", "mixed", "row_wise", "column_wise"}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      const auto tables = sharded_collection(mesh, plan, {.optimizer = embedding::Sgd{}});
      const auto parts = tables->named_modules();
      for (const std::string name :
           {"embedding_bags", "embedding_bags.users", "embedding_bags.cities"}) {
        SCOPED_TRACE(plan + ": " + name);
        torch::nn::Module& part = *parts[name];
        EXPECT_EQ(mesh_of(part).world_size(), 2);
        const StateDict before = state_dict(part);
        const StateDict of_collection = state_dict(*tables);
        for (const StateDict::Item& item : before) {
          const std::string in_collection = name + "." + item.fqn;
          EXPECT_TRUE(before.tensor(item.fqn).equal(of_collection.tensor(in_collection)));
        }
        EXPECT_EQ(state_dict(part, {.rank0_only = true}).empty(), mesh.rank() == 1);
        {
          const at::NoGradGuard no_grad;
          for (at::Tensor& weight : part.parameters()) weight.zero_();
        }
        load_state_dict(part, mesh.rank() == 0 ? before : StateDict(), {.rank0_only = true});
        for (const StateDict::Item& item : before) {
          EXPECT_TRUE(state_dict(part).tensor(item.fqn).equal(before.tensor(item.fqn)));
        }
      }
    });
  }
}

// Shows C2, D4.
TEST(ModuleStateTest, APartOfACollectionMayHaveATypeOfItsOwn) {
  for (const std::string part : {"embedding_bags", "embedding_bags.cities"}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      const auto tables = sharded_collection(mesh, "row_wise", {});
      const StateDict expected = state_dict(*tables);
      const StateDictTypeScope scope(*tables->named_modules()[part],
                                     {.type = FULL, .rank0_only = true});
      for (const StateDictType type : {SHARDED, FULL}) {
        const StateDict found = state_dict(*tables, {.type = type});
        for (const StateDict::Item& item : expected) {
          SCOPED_TRACE(part + ": " + item.fqn);
          const bool is_in_part = item.fqn.starts_with(part + ".");
          ASSERT_EQ(found.contains(item.fqn), !is_in_part || mesh.rank() == 0);
          if (!found.contains(item.fqn)) continue;
          const auto& entry = std::get<StateTensor>(*found.find(item.fqn));
          EXPECT_EQ(entry.is_whole(), is_in_part || type == FULL);
          if (!entry.is_whole()) continue;
          EXPECT_TRUE(found.tensor(item.fqn).equal(expected.tensor(item.fqn)));
        }
      }
    });
  }
}

// Shows C1, D4.
TEST(ModuleStateTest, HooksOfAPartMeetWholeTables) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto tables = sharded_collection(mesh, "row_wise", {});
    const StateDict before = state_dict(*tables);
    torch::nn::Module& part = *tables->named_modules()["embedding_bags"];
    registry::add_state_dict_post_hook(
        part, [](torch::nn::Module&, StateDict& state, const std::string& prefix,
                 const StateDictOptions&) { state.tensor(prefix + "users.weight").mul_(2); });
    registry::add_load_state_dict_pre_hook(
        part, [](torch::nn::Module&, StateDict& state, const std::string& prefix, LoadReport&) {
          state.set(prefix + "users.weight",
                    StateTensor::whole(state.tensor(prefix + "users.weight") / 2));
        });
    const std::string users = "embedding_bags.users.weight";
    const StateDict saved = state_dict(*tables);
    EXPECT_TRUE(saved.tensor(users).equal(2 * before.tensor(users)));
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& weight : tables->parameters()) weight.zero_();
    }
    load_state_dict(*tables, saved);
    EXPECT_TRUE(state_dict(*tables).tensor(users).equal(saved.tensor(users)));
  });
}

// Shows D3, D4.
TEST(ModuleStateTest, AnOptimizerMayHaveFusedParametersAndLeavesThemAlone) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    const auto tables =
        sharded_collection(mesh, "table_wise", {.optimizer = embedding::Sgd{.lr = 0.1}});
    const auto same =
        sharded_collection(mesh, "table_wise", {.optimizer = embedding::Sgd{.lr = 0.1}});
    torch::optim::SGD optimizer(tables->parameters(),
                                torch::optim::SGDOptions(0.5).momentum(0.9).weight_decay(0.1));
    for (int step = 0; step < 3; ++step) {
      const auto batch = test::small_batch(mesh.rank(), step);
      test::loss_of(tables->forward(batch).values()).backward();
      optimizer.step();
      optimizer.zero_grad();
      test::loss_of(same->forward(batch).values()).backward();
    }
    for (const std::string table : {"users", "cities", "days", "again"}) {
      EXPECT_TRUE(torch::equal(tables->weight(table), same->weight(table))) << table;
      EXPECT_FALSE(tables->weight(table).grad().defined()) << table;
    }
    const StateDict state = optim_state_dict(*tables, optimizer);
    const auto* const members =
        std::get<Value>(*state.find("param_groups.1.params")).get_if<Value::List>();
    ASSERT_NE(members, nullptr);
    EXPECT_EQ(members->size(), 4U) << "the tables' own group";
  });
}

// Shows D6.
TEST(ModuleStateTest, KernelsAreChosenApartFromTheSharding) {
  for (const std::string plan : {"table_wise", "row_wise", "column_wise", "data_parallel"}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      at::set_num_threads(1);
      const auto tables =
          sharded_collection(mesh, plan,
                             {.kernel = {{"users", Kernel::dense}, {"days", Kernel::fused}},
                              .optimizer = embedding::Sgd{.lr = 0.1}});
      const auto fused = sharded_collection(mesh, plan, {.optimizer = embedding::Sgd{.lr = 0.1}});
      torch::optim::SGD optimizer(tables->parameters(), torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        const auto batch = test::small_batch(mesh.rank(), step);
        test::loss_of(tables->forward(batch).values()).backward();
        EXPECT_FALSE(tables->weight("days").grad().defined());
        optimizer.step();
        optimizer.zero_grad();
        test::loss_of(fused->forward(batch).values()).backward();
      }
      for (const std::string table : {"users", "days", "again"}) {
        EXPECT_TRUE(torch::allclose(tables->weight(table), fused->weight(table), 1e-6, 1e-7))
            << plan << ": " << table;
      }
    });
  }
}

// Shows D5.
TEST(ModuleStateTest, TablesReduceTheirGradientsWhateverIsAroundThem) {
  enum class Around { nothing, replicate, fully_shard };
  for (const std::string plan : {"data_parallel", "mixed"}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      at::set_num_threads(1);
      std::vector<std::vector<at::Tensor>> weights;
      for (const Around around : {Around::nothing, Around::replicate, Around::fully_shard}) {
        test::ModelWithTables model = test::model_with(sharded_collection(
            mesh, plan, {.kernel = {{"days", Kernel::dense}}, .optimizer = embedding::Adagrad{}}));
        if (around == Around::replicate) replicate(*model, {.mesh = mesh});
        if (around == Around::fully_shard) fully_shard(*model, {.mesh = mesh});
        torch::optim::SGD optimizer(model->tables->parameters(), torch::optim::SGDOptions(0.1));
        for (int step = 0; step < 3; ++step) {
          const auto batch = test::small_batch(mesh.rank(), step);
          test::loss_of(around == Around::nothing ? model->forward(batch)
                                                  : tessera::forward(model, batch))
              .backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        weights.push_back(model->tables->parameters());
      }
      for (std::size_t i = 0; i < weights[0].size(); ++i) {
        EXPECT_TRUE(torch::equal(weights[0][i], weights[1][i])) << plan << ", replicate: " << i;
        EXPECT_TRUE(torch::equal(weights[0][i], weights[2][i])) << plan << ", fully_shard: " << i;
      }
    });
  }
}

}  // namespace
}  // namespace tessera
