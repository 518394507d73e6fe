// Embedding tables on a device.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include "accelerator/accelerator.h"
#include "runtime/embedding/sharded_training.h"
#include "runtime/support/checks.h"
#include "support/random.h"
#include "support/temporary_directory.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::PlanKind;
using test::Way;
using test::accelerator::device;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TablesOnDeviceTest : public test::AcceleratorTest {};

/// Returns a row-wise optimizer with weighted ids and Pooling::mean. If `has_all_optimizers`, adds
/// every optimizer with Pooling::sum.
std::vector<Way> some_ways(bool has_all_optimizers) {
  std::vector<Way> ways;
  ways.push_back({{.is_weighted = true, .pooling = Pooling::mean}, test::fused_optimizers()[2]});
  if (!has_all_optimizers) return ways;
  for (const embedding::FusedOptimizer& optimizer : test::fused_optimizers()) {
    ways.push_back({{}, optimizer});
  }
  return ways;
}

void expect_training_as_alone(const std::string& mode, int world_size, bool has_batches_on_device) {
  const std::vector<Way> ways = some_ways((mode == "Lazy" || mode == "Gpu") && world_size < 3);
  std::vector<test::Trained> alone;
  for (const Way& way : ways) alone.push_back(test::train_alone(world_size, way));
  for (const PlanKind& kind : test::plan_kinds()) {
    SCOPED_TRACE(kind.name + " on " + std::to_string(world_size));
    test::on_devices(world_size, [&](const dist::Mesh& mesh) {
      const at::Device own = device(mesh.rank());
      for (std::size_t i = 0; i < ways.size(); ++i) {
        const test::Trained sharded =
            test::train_sharded(mesh, kind, ways[i], {.device = own},
                                has_batches_on_device ? own : at::Device(at::kCPU));
        test::expect_shards_of(alone[i], sharded, ways[i], mesh);
      }
    });
    test::accelerator::end();
  }
}

TEST_P(TablesOnDeviceTest, EqualTheUnshardedTablesOnOneRank) {
  expect_training_as_alone(GetParam(), 1, false);
}
TEST_P(TablesOnDeviceTest, EqualTheUnshardedTablesOnTwoRanks) {
  expect_training_as_alone(GetParam(), 2, false);
}
TEST_P(TablesOnDeviceTest, EqualTheUnshardedTablesOnFourRanks) {
  expect_training_as_alone(GetParam(), 4, false);
}
TEST_P(TablesOnDeviceTest, TakeBatchesOnTheDevice) {
  expect_training_as_alone(GetParam(), test::num_ranks(3), true);
}

TEST_P(TablesOnDeviceTest, BeginWithTheValuesOfTheCpu) {
  auto configs = test::small_tables();
  for (EmbeddingBagConfig& config : configs) config.init_fn = {};
  const auto values_on = [&](at::Device where, at::Device of_collection) {
    torch::manual_seed(3);
    const EmbeddingBagCollection collection(configs, {.device = of_collection});
    const auto tables = shard(collection, test::plan_of(test::plan_kind("row_wise"), 1),
                              dist::Mesh(), {.device = where});
    EXPECT_EQ(tables->weight("users").device(), where);
    return tables->weight("users").detach().cpu();
  };
  const at::Device own = device(0);
  EXPECT_TRUE(torch::equal(values_on(own, at::kMeta), values_on(at::kCPU, at::kMeta)));
  EXPECT_TRUE(torch::equal(values_on(own, own), values_on(at::kCPU, at::kCPU)));
}

// ---- What the host waits for.

/// Returns tables on a rank's device, sharded by the plan kind "mixed".
std::shared_ptr<ShardedEmbeddingBagCollection> mixed_tables(const dist::Mesh& mesh,
                                                            ShardOptions options = {}) {
  options.device = device(mesh.rank());
  if (!options.optimizer) options.optimizer = test::fused_optimizers()[2];
  return shard(test::small_collection(), test::plan_of(test::plan_kind("mixed"), mesh.world_size()),
               mesh, options);
}

/// Returns an event at the end of the current stream's present work.
c10::Event end_of_present_work(at::Device own) {
  c10::Event event(own.type());
  event.record(c10::impl::VirtualGuardImpl(own.type()).getStream(own));
  return event;
}

TEST_P(TablesOnDeviceTest, NoOperatorOfAStepMakesTheHostWait) {
  if (!test::accelerator::knows_waiting_operators()) {
    GTEST_SKIP() << "what the host waits for is not known";
  }
  for (const bool is_on_device : {false, true}) {
    test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
      const at::Device own = device(mesh.rank());
      const auto tables = mixed_tables(mesh);
      std::vector<KeyedJaggedTensor> batches;
      for (int step = 0; step < 3; ++step) {
        batches.push_back(test::small_batch(mesh.rank(), step).to(is_on_device ? own : at::kCPU));
      }
      for (int step = 0; step < 3; ++step) {
        test::loss_of(tables->forward(batches[static_cast<std::size_t>(step)]).values()).backward();
        const auto waited = test::accelerator::take_waiting_operators(own);
        if (step > 0) {
          EXPECT_THAT(waited, IsEmpty());
        }
      }
    });
    test::accelerator::end();
  }
}

TEST_P(TablesOnDeviceTest, APipelineSendsBatchesBesideTheStepBefore) {
  if (GetParam() == "Eager") GTEST_SKIP() << "work runs as soon as it is launched";
  if (GetParam() != "Lazy") GTEST_SKIP() << "work ends at random times";
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    const at::Device own = device(mesh.rank());
    const auto tables = mixed_tables(mesh);
    int next = 0;
    InputPipeline<KeyedJaggedTensor> batches(
        tables,
        [&]() -> std::optional<KeyedJaggedTensor> {
          if (next == 4) return std::nullopt;
          return test::small_batch(mesh.rank(), next++);
        },
        [](const KeyedJaggedTensor& batch) { return batch; });
    int num_steps = 0;
    std::optional<c10::Event> computed;
    while (auto item = batches.next()) {
      // `next` has returned, so the host knows the sizes of this batch. The device has not yet
      // computed the previous step.
      if (computed) {
        EXPECT_FALSE(computed->query()) << num_steps;
      }
      test::loss_of(tables->forward(std::move(item->input)).values()).backward();
      computed.emplace(end_of_present_work(own));
      ++num_steps;
    }
    EXPECT_EQ(num_steps, 4);
  });
}

TEST_P(TablesOnDeviceTest, APipelineGivesWhatBatchesGiveOneByOne) {
  const Way way{{}, test::fused_optimizers()[3]};
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    const auto one_by_one = mixed_tables(mesh, {.optimizer = way.optimizer});
    const auto pipelined = mixed_tables(mesh, {.optimizer = way.optimizer});
    int next = 0;
    InputPipeline<int> batches(
        pipelined,
        [&]() -> std::optional<int> {
          if (next == 5) return std::nullopt;
          return next++;
        },
        [&](int step) { return test::small_batch(mesh.rank(), step); });
    while (auto item = batches.next()) {
      const at::Tensor expected =
          one_by_one->forward(test::small_batch(mesh.rank(), item->batch)).values();
      test::loss_of(expected).backward();
      const at::Tensor found = pipelined->forward(std::move(item->input)).values();
      test::loss_of(found).backward();
      EXPECT_TRUE(torch::equal(found.cpu(), expected.cpu())) << item->batch;
    }
    test::expect_close(state_dict(*pipelined, {.offload_to_cpu = true}),
                       state_dict(*one_by_one, {.offload_to_cpu = true}), "state");
  });
}

// ---- State.

TEST_P(TablesOnDeviceTest, ASaveInTheBackgroundHasTheStateOfItsStart) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "step-2";
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    const auto tables = mixed_tables(mesh);
    const auto step = [&](ShardedEmbeddingBagCollection& own, int number) {
      test::loss_of(own.forward(test::small_batch(mesh.rank(), number)).values()).backward();
    };
    for (int i = 0; i < 2; ++i) step(*tables, i);
    const StateDict expected = state_dict(*tables, {.offload_to_cpu = true});
    const StateDict expected_state = optim_state_dict(*tables, {.offload_to_cpu = true});
    TrainState state(tables);
    save(state, path, {.async = true});
    for (int i = 2; i < 5; ++i) step(*tables, i);
    state.wait();
    const auto other = mixed_tables(mesh, {.cached_rows = {{"days", 20}}});
    step(*other, 7);  // so that rows are on the device
    load(TrainState(other), path);
    test::expect_close(state_dict(*other, {.offload_to_cpu = true}), expected, "weights");
    test::expect_close(optim_state_dict(*other, {.offload_to_cpu = true}), expected_state, "state");
  });
}

// ---- Bad input.

TEST_P(TablesOnDeviceTest, AnIdOutOfRangeOnTheDeviceIsNamed) {
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    const auto tables = mixed_tables(mesh);
    const KeyedJaggedTensor good = test::small_batch(mesh.rank(), 0).to(device(mesh.rank()));
    KeyedJaggedTensor bad = good;
    if (mesh.rank() == 0) {
      at::Tensor values = good.values().clone();
      values[0] = 11;
      bad = KeyedJaggedTensor::from_lengths(good.keys(), values, good.lengths());
    }
    const std::string message = test::error_of([&] { tables->forward(bad); });
    EXPECT_THAT(message, HasSubstr(mesh.rank() == 0 ? "users: feature 'user', sample"
                                                    : "an invalid batch on rank 0"));
    tables->forward(good);  // the next batch is not affected
  });
}

TEST_P(TablesOnDeviceTest, AnotherDeviceIsRefused) {
  if (test::num_ranks(2) < 2) GTEST_SKIP() << "needs two devices";
  const auto tables =
      shard(test::small_collection(), test::plan_of(test::plan_kind("table_wise"), 1), dist::Mesh(),
            {.device = device(0)});
  EXPECT_THAT(test::error_of([&] { tables->forward(test::small_batch(0, 0).to(device(1))); }),
              HasSubstr("expected tensors on the CPU or on " + device(0).str() +
                        ", found values on " + device(1).str()));
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    EXPECT_THAT(test::error_of([&] {
                  shard(test::small_collection(), test::plan_of(test::plan_kind("table_wise"), 2),
                        mesh, {.device = at::kCPU});
                }),
                HasSubstr("a device for which the mesh has collectives"));
  });
}

// ---- Rows cached on the device.

constexpr std::int64_t kNumRows = 300;
constexpr std::int64_t kCachedRows = 70;  // the batches of two ranks look up at most 64

std::vector<EmbeddingBagConfig> large_tables() {
  return {{.name = "items",
           .num_embeddings = kNumRows,
           .embedding_dim = 6,
           .feature_names = {"item", "other"}},
          {.name = "small", .num_embeddings = 9, .embedding_dim = 3, .feature_names = {"day"}}};
}

/// Returns a random batch of four samples. Low ids are more frequent.
KeyedJaggedTensor drawn_batch(test::Random& random) {
  std::vector<std::int64_t> values, lengths;
  for (const std::int64_t num_rows : {kNumRows, kNumRows, std::int64_t{9}}) {
    for (int sample = 0; sample < 4; ++sample) {
      lengths.push_back(random.between(0, 5));
      for (std::int64_t i = 0; i < lengths.back(); ++i) {
        values.push_back(random.between(0, random.between(1, num_rows + 1)));
      }
    }
  }
  return KeyedJaggedTensor::from_lengths({"item", "other", "day"}, torch::tensor(values, at::kLong),
                                         torch::tensor(lengths, at::kLong));
}

/// Trains tables with all rows on the device, and the same tables with only some rows cached there.
/// Expects equal bits.
void expect_cached_as_uncached(TableSharding sharding, int world_size,
                               const embedding::FusedOptimizer& optimizer) {
  SCOPED_TRACE(std::string(embedding::name_of(optimizer)) + " on " + std::to_string(world_size));
  TablePlan plan{world_size, {}};
  plan.tables["items"] = {sharding, world_size == 1 ? std::vector{0} : std::vector{0, 1}};
  plan.tables["small"] = {TableSharding::table_wise, {0}};
  const EmbeddingBagCollection collection(large_tables());
  test::on_devices(world_size, [&](const dist::Mesh& mesh) {
    const auto sharded = [&](std::map<std::string, std::int64_t> cached_rows) {
      return shard(collection, plan, mesh,
                   {.optimizer = optimizer,
                    .device = device(mesh.rank()),
                    .cached_rows = std::move(cached_rows)});
    };
    const auto all = sharded({});
    const auto cached = sharded({{"items", kCachedRows}});
    EXPECT_TRUE(cached->weight("items").is_cpu());
    test::Random random(static_cast<std::uint64_t>(mesh.rank()));
    for (int step = 0; step < 12; ++step) {
      const KeyedJaggedTensor batch = drawn_batch(random);
      const at::Tensor expected = all->forward(batch).values();
      const at::Tensor found = cached->forward(batch).values();
      if (step % 3 == 0) cached->forward(drawn_batch(random));  // replaces some cached rows
      test::loss_of(expected).backward();
      test::loss_of(found).backward();
      EXPECT_TRUE(torch::equal(found.cpu(), expected.cpu())) << step;
      if (step == 6) cached->write_back_cached_rows();
    }
    cached->write_back_cached_rows();
    EXPECT_TRUE(torch::equal(cached->weight("items"), all->weight("items").cpu()));
    test::expect_close(optim_state_dict(*cached, {.offload_to_cpu = true}),
                       optim_state_dict(*all, {.offload_to_cpu = true}), "state");
  });
  test::accelerator::end();
}

TEST_P(TablesOnDeviceTest, CachedRowsGiveTheBitsOfAllRows) {
  for (const embedding::FusedOptimizer& optimizer : test::fused_optimizers()) {
    const bool is_row_wise = std::holds_alternative<embedding::RowWiseAdam>(optimizer);
    if (GetParam() == "SlowThreads" && !is_row_wise) continue;
    expect_cached_as_uncached(TableSharding::table_wise, 1, optimizer);
    if (test::num_ranks(2) < 2) continue;
    expect_cached_as_uncached(TableSharding::row_wise, 2, optimizer);
    expect_cached_as_uncached(TableSharding::column_wise, 2, optimizer);
  }
}

TEST_P(TablesOnDeviceTest, APartHasTheCachedRows) {
  const auto tables =
      shard(test::small_collection(), test::plan_of(test::plan_kind("table_wise"), 1), dist::Mesh(),
            {.optimizer = embedding::Sgd{.lr = 0.5},
             .device = device(0),
             .cached_rows = {{"days", 20}, {"again", 20}}});
  const auto train = [&] {
    test::loss_of(tables->forward(test::small_batch(0, 0)).values()).backward();
  };
  torch::nn::Module& part = *tables->named_modules()["embedding_bags"];
  const at::Tensor initial = state_dict(part).tensor("days.weight");
  train();
  const StateDict of_part = state_dict(part);
  EXPECT_FALSE(of_part.tensor("days.weight").equal(initial));
  const StateDict trained = state_dict(*tables, {.offload_to_cpu = true});
  for (const StateDict::Item& item : of_part) {
    EXPECT_TRUE(of_part.tensor(item.fqn).cpu().equal(trained.tensor("embedding_bags." + item.fqn)))
        << item.fqn;
  }
  train();  // changes cached rows again
  load_state_dict(part, of_part);
  test::expect_close(state_dict(*tables, {.offload_to_cpu = true}), trained, "loaded");
  test::accelerator::end();
}

TEST_P(TablesOnDeviceTest, ABatchThatNeedsMoreRowsThanAreCachedChangesNothing) {
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    const auto tables = shard(test::small_collection(),
                              test::plan_of(test::plan_kind("table_wise"), mesh.world_size()), mesh,
                              {.optimizer = embedding::Sgd{},
                               .device = device(mesh.rank()),
                               .cached_rows = {{"users", 2}}});
    const StateDict before = state_dict(*tables, {.offload_to_cpu = true});
    const std::string message =
        test::error_of([&] { tables->forward(test::small_batch(mesh.rank(), 0)); });
    EXPECT_THAT(message, HasSubstr(mesh.rank() == 0
                                       ? "users: rows of a batch in one table: expected at most 2"
                                       : "too many on rank 0"));
    test::expect_close(state_dict(*tables, {.offload_to_cpu = true}), before, "state");
    // A batch that fits still works.
    const std::vector<std::string> keys = {"user", "item", "city", "day"};
    const auto small = KeyedJaggedTensor::from_lengths(keys, torch::tensor({1L, 2L, 0L, 3L}),
                                                       torch::tensor({1L, 1L, 1L, 1L}));
    test::loss_of(tables->forward(small).values()).backward();
  });
}

TEST_P(TablesOnDeviceTest, CachedRowsThatCannotBeAreRefused) {
  const auto refused = [&](const ShardOptions& options, const std::string& plan) {
    return test::error_of([&] {
      shard(test::small_collection(), test::plan_of(test::plan_kind(plan), 1), dist::Mesh(),
            options);
    });
  };
  const auto sgd = embedding::FusedOptimizer(embedding::Sgd{});
  const at::Device own = device(0);
  EXPECT_THAT(refused({.optimizer = sgd, .device = own, .cached_rows = {{"users", 0}}}, "row_wise"),
              HasSubstr("users: cached_rows of a table: expected 1 to"));
  EXPECT_THAT(refused({.optimizer = sgd, .device = own, .cached_rows = {{"none", 5}}}, "row_wise"),
              HasSubstr("a table of this name"));
  EXPECT_THAT(refused({.device = own, .cached_rows = {{"users", 5}}}, "row_wise"),
              HasSubstr("the fused kernel"));
  EXPECT_THAT(
      refused({.optimizer = sgd, .device = own, .cached_rows = {{"users", 5}}}, "data_parallel"),
      HasSubstr("a table that is sharded"));
}

// ---- Tables and sharded layers under one root.

/// Tables between two layers. Only rank 0 uses the layer `sometimes`, which runs before the tables.
struct RecommenderImpl : torch::nn::Module {
  explicit RecommenderImpl(std::shared_ptr<ShardedEmbeddingBagCollection> its_tables)
      : tables(register_module("tables", std::move(its_tables))),
        sometimes(register_module("sometimes", torch::nn::Linear(4, 4))),
        top(register_module("top", torch::nn::Linear(32, 4))) {
    const torch::NoGradGuard no_grad;
    for (torch::nn::Linear layer : {sometimes, top}) {
      for (at::Tensor& parameter : layer->parameters()) {
        parameter.copy_(torch::linspace(-0.5, 0.4, parameter.numel()).view(parameter.sizes()));
      }
    }
  }
  at::Tensor forward(const KeyedJaggedTensor& batch, std::int64_t batch_size, bool uses_both) {
    at::Tensor hidden = torch::ones({batch_size, 4}, top->weight.options().requires_grad(false));
    if (uses_both) hidden = torch::tanh(sometimes->forward(hidden));
    return torch::tanh(hidden * top->forward(tables->forward(batch).values())).sum();
  }
  std::shared_ptr<ShardedEmbeddingBagCollection> tables;
  torch::nn::Linear sometimes, top;
};
TORCH_MODULE(Recommender);

/// Returns the losses of a rank's steps.
std::vector<float> losses_of_recommender(const dist::Mesh& mesh, at::Device own) {
  Recommender model(shard(test::small_collection(),
                          test::plan_of(test::plan_kind("mixed"), mesh.world_size()), mesh,
                          {.optimizer = test::fused_optimizers()[2], .device = own}));
  for (torch::nn::Linear layer : {model->sometimes, model->top}) layer->to(own);
  fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::LinearImpl>()});
  torch::optim::SGD optimizer(parameters(*model), torch::optim::SGDOptions(0.01));
  std::vector<float> losses;
  for (int step = 0; step < 4; ++step) {
    const at::Tensor loss =
        forward(model, test::small_batch(mesh.rank(), step),
                test::small_batch_size(mesh.rank(), step), mesh.rank() == 0 && step != 2);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<float>());
  }
  return losses;
}

TEST_P(TablesOnDeviceTest, TrainBesideLayersThatSomeRanksUse) {
  const int world_size = test::num_ranks(2);
  std::vector<std::vector<float>> on_cpu(2);
  test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
    on_cpu[static_cast<std::size_t>(mesh.rank())] = losses_of_recommender(mesh, at::kCPU);
  });
  test::on_devices(world_size, [&](const dist::Mesh& mesh) {
    EXPECT_THAT(losses_of_recommender(mesh, device(mesh.rank())),
                ::testing::Pointwise(::testing::FloatNear(1e-4F),
                                     on_cpu[static_cast<std::size_t>(mesh.rank())]));
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, TablesOnDeviceTest, ::testing::ValuesIn(test::accelerator::modes()),
                         test::name_of_mode);

}  // namespace
}  // namespace tessera
