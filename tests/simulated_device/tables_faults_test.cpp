// Embedding tables on a device: steps that fail midway, and calls that are refused.
#include <gmock/gmock.h>

#include <limits>

#include "accelerator/accelerator.h"
#include "runtime/embedding/sharded_training.h"
#include "runtime/support/checks.h"
#include "simulated_device/device.h"
#include "support/temporary_directory.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::accelerator::device;
using ::testing::HasSubstr;
using Tables = std::shared_ptr<ShardedEmbeddingBagCollection>;

class TableFaultsTest : public test::AcceleratorTest {};

constexpr std::int64_t kCachedRows = 21;

/// Returns tables on a rank's device. `is_cached`: whether two tables are in host memory, with some
/// rows cached on the device.
Tables tables_on(const dist::Mesh& mesh, bool is_cached, const std::string& plan = "table_wise",
                 const embedding::FusedOptimizer& optimizer = test::fused_optimizers()[2]) {
  ShardOptions options{.optimizer = optimizer, .device = device(mesh.rank())};
  if (is_cached) options.cached_rows = {{"days", kCachedRows}, {"again", kCachedRows - 5}};
  return shard(test::small_collection(), test::plan_of(test::plan_kind(plan), mesh.world_size()),
               mesh, options);
}

at::Tensor loss_of(const Tables& tables, const KeyedJaggedTensor& batch) {
  return test::loss_of(tables->forward(batch).values());
}

void step(const Tables& tables, const KeyedJaggedTensor& batch) {
  loss_of(tables, batch).backward();
}

/// Expects the same bits in the weights and in the optimizer state of two collections.
void expect_same_state(const Tables& found, const Tables& expected) {
  const auto states_of = [](const Tables& tables) {
    return std::pair(state_dict(*tables, {.offload_to_cpu = true}),
                     optim_state_dict(*tables, {.offload_to_cpu = true}));
  };
  const auto [weights, state] = states_of(found);
  const auto [expected_weights, expected_state] = states_of(expected);
  for (const EmbeddingBagConfig& config : test::small_tables()) {
    EXPECT_TRUE(torch::equal(found->weight(config.name).cpu(), expected->weight(config.name).cpu()))
        << config.name;
  }
  test::expect_close(weights, expected_weights, "weights");
  test::expect_close(state, expected_state, "state");
}

// ---- Memory of the device.

TEST_P(TableFaultsTest, ATableThatDoesNotFitIsNamedAndFailsOnAllRanks) {
  test::on_devices(2, [&](const dist::Mesh& mesh) {
    const std::int64_t before = sim::memory_of(mesh.rank()).now;
    // Rank 1 has the tables "cities" (3 rows of 5 columns) and "again" (20 rows of 7). The state of
    // each row is one float more.
    if (mesh.rank() == 1) sim::limit_memory(1, before + 1024);
    const std::string message = test::error_of([&] { tables_on(mesh, false); });
    EXPECT_THAT(message,
                HasSubstr(mesh.rank() == 1
                              ? "again: memory for a table and its optimizer state: expected 640 "
                                "bytes on sim:1"
                              : "embedding tables: expected every rank to make its shards, found "
                                "an error on rank 1"));
    EXPECT_EQ(sim::memory_of(mesh.rank()).now, before);
    sim::limit_memory(mesh.rank(), std::numeric_limits<std::int64_t>::max());
    step(tables_on(mesh, false), test::small_batch(mesh.rank(), 0));  // the mesh still works
  });
}

TEST_P(TableFaultsTest, CachedRowsThatDoNotFitAreNamed) {
  const std::int64_t pinned_before = sim::pinned_nbytes();
  sim::limit_memory(0, sim::memory_of(0).now + 2048);
  // 21 rows of 4 columns, and one float of state for each row.
  EXPECT_THAT(test::error_of([&] { tables_on(dist::Mesh(), true); }),
              HasSubstr("days: memory for cached rows of a table and their optimizer state: "
                        "expected 420 bytes on "
                        "sim:0"));
  EXPECT_EQ(sim::pinned_nbytes(), pinned_before);
}

TEST_P(TableFaultsTest, AWholeTableThatDoesNotFitIsNamed) {
  sim::limit_memory(0, sim::memory_of(0).now + 512);
  EXPECT_THAT(
      test::error_of([&] { EmbeddingBagCollection(test::small_tables(), {.device = device(0)}); }),
      HasSubstr("cities: memory for a table: expected 60 bytes on sim:0"));
}

TEST_P(TableFaultsTest, HostMemoryThatDoesNotFitIsNamed) {
  const std::vector<EmbeddingBagConfig> configs = {{.name = "huge",
                                                    .num_embeddings = std::int64_t{1} << 44,
                                                    .embedding_dim = 64,
                                                    .feature_names = {"id"}}};
  EXPECT_THAT(test::error_of([&] { EmbeddingBagCollection{configs}; }),
              HasSubstr("huge: memory for a table: expected 4503599627370496 bytes on cpu"));
  const EmbeddingBagCollection whole(configs, {.device = at::kMeta});
  const TablePlan plan{1, {{"huge", {TableSharding::table_wise, {0}}}}};
  EXPECT_THAT(test::error_of([&] {
                shard(whole, plan, dist::Mesh(), {.optimizer = embedding::RowWiseAdagrad{}});
              }),
              HasSubstr("huge: memory for a table and its optimizer state: expected "
                        "4573968371548160 bytes on cpu"));
  EXPECT_THAT(test::error_of([&] {
                shard(whole, plan, dist::Mesh(),
                      {.optimizer = embedding::RowWiseAdagrad{},
                       .device = device(0),
                       .cached_rows = {{"huge", 100}}});
              }),
              HasSubstr("huge: memory for a table and its optimizer state: expected "
                        "4573968371548160 bytes of pinned host memory"));
}

/// Runs `body` again and again, until no allocation fails. Run number n (from 0) makes the
/// allocation after the first n fail. Calls `after_failure` after each failure. Returns the number
/// of failures.
template <class Body, class AfterFailure>
int fail_each_allocation(const Body& body, const AfterFailure& after_failure) {
  for (int number = 0;; ++number) {
    sim::fail_allocation_after(0, number);
    try {
      body();
      sim::fail_allocation_after(0, -1);
      return number;
    } catch (const c10::OutOfMemoryError&) {
      sim::fail_allocation_after(0, -1);
      after_failure();
    }
  }
}

TEST_P(TableFaultsTest, AForwardWithoutMemoryLeavesTheTablesAsTheyWere) {
  for (const bool is_cached : {false, true}) {
    SCOPED_TRACE(is_cached ? "cached" : "all rows on the device");
    const Tables tables = tables_on(dist::Mesh(), is_cached);
    const Tables expected = tables_on(dist::Mesh(), false);
    int num_failures = 0;
    for (int number = 0; number < 6; ++number) {
      const KeyedJaggedTensor batch = test::small_batch(0, number);
      at::Tensor loss;
      num_failures += fail_each_allocation([&] { loss = loss_of(tables, batch); }, [] {});
      const at::Tensor expected_loss = loss_of(expected, batch);
      EXPECT_TRUE(torch::equal(loss.cpu(), expected_loss.cpu())) << number;
      loss.backward();
      expected_loss.backward();
    }
    EXPECT_GT(num_failures, 20);
    expect_same_state(tables, expected);
  }
}

TEST_P(TableFaultsTest, ACheckpointMendsABackwardWithoutMemory) {
  const test::TemporaryDirectory directory;
  for (const bool is_cached : {false, true}) {
    SCOPED_TRACE(is_cached ? "cached" : "all rows on the device");
    const auto adam = test::fused_optimizers()[4];  // its state includes the number of steps
    const Tables tables = tables_on(dist::Mesh(), is_cached, "table_wise", adam);
    const Tables expected = tables_on(dist::Mesh(), false, "table_wise", adam);
    for (int number = 0; number < 3; ++number) {
      step(tables, test::small_batch(0, number));
      step(expected, test::small_batch(0, number));
    }
    TrainState state(tables);
    const std::string path = directory / (is_cached ? "cached" : "uncached");
    save(state, path);
    const KeyedJaggedTensor batch = test::small_batch(0, 4);
    at::Tensor loss = loss_of(tables, batch);
    const int num_failures = fail_each_allocation([&] { loss.backward(); },
                                                  [&] {
                                                    load(state, path);
                                                    loss = loss_of(tables, batch);
                                                  });
    EXPECT_GT(num_failures, 3);
    step(expected, batch);
    expect_same_state(tables, expected);
  }
}

// ---- Batches.

TEST_P(TableFaultsTest, ARefusedBatchChangesNothing) {
  test::on_devices(2, [&](const dist::Mesh& mesh) {
    const at::Device own = device(mesh.rank());
    const Tables tables = tables_on(mesh, true);
    const Tables expected = tables_on(mesh, true);
    for (int number = 0; number < 2; ++number) {
      step(tables, test::small_batch(mesh.rank(), number));
      step(expected, test::small_batch(mesh.rank(), number));
    }
    const KeyedJaggedTensor good = test::small_batch(mesh.rank(), 2);
    for (const std::int64_t id : {std::int64_t{11}, std::int64_t{-1}, std::int64_t{1} << 40,
                                  std::numeric_limits<std::int64_t>::min()}) {
      for (const bool is_on_device : {false, true}) {
        SCOPED_TRACE(std::to_string(id) + (is_on_device ? " on the device" : " on the host"));
        at::Tensor values = good.values().clone();
        if (mesh.rank() == 0) values[0] = id;
        const KeyedJaggedTensor bad =
            KeyedJaggedTensor::from_lengths(good.keys(), values, good.lengths())
                .to(is_on_device ? own : at::Device(at::kCPU));
        EXPECT_THAT(test::error_of([&] { tables->forward(bad); }),
                    HasSubstr(mesh.rank() == 0 ? "users: feature 'user', sample 0, position 0: "
                                                 "expected a row of the table, 0 to 10, found id " +
                                                     std::to_string(id)
                                               : "an invalid batch on rank 0"));
      }
    }
    const at::Device other = device(3);
    EXPECT_THAT(
        test::error_of([&] { tables->forward(good.to(other)); }),
        HasSubstr("expected tensors on the CPU or on " + own.str() + ", found values on sim:3"));
    step(tables, good);
    step(expected, good);
    expect_same_state(tables, expected);
  });
}

TEST_P(TableFaultsTest, ADeviceWithoutTheMeshsCollectivesIsRefused) {
  test::on_devices(2, [&](const dist::Mesh& mesh) {
    EXPECT_THAT(test::error_of([&] {
                  shard(test::small_collection(), test::plan_of(test::plan_kind("table_wise"), 2),
                        mesh, {.optimizer = embedding::Sgd{}, .device = device(2 + mesh.rank())});
                }),
                HasSubstr("device of embedding tables: expected a device for which the mesh has "
                          "collectives, such as " +
                          device(mesh.rank()).str() + ", found " + device(2 + mesh.rank()).str()));
  });
}

TEST_P(TableFaultsTest, CachedTablesThatAreMovedWithTheirModelAreRefused) {
  const Tables tables = tables_on(dist::Mesh(), true);
  test::ModelWithTables model = test::model_with(tables);
  model->to(device(0));
  const std::string message = test::error_of([&] { tables->forward(test::small_batch(0, 0)); });
  EXPECT_THAT(message,
              HasSubstr("days: weight of a table: expected the contiguous shard [23, 4] of "
                        "Float that tessera::shard made on cpu"));
  EXPECT_THAT(message, HasSubstr("do not call Module::to on tables"));
}

// ---- Steps that end early.

struct Model {
  Model(const dist::Mesh& mesh, bool is_cached)
      : own(device(mesh.rank())),
        tables(tables_on(mesh, is_cached, "mixed")),
        model(test::model_with(tables)),
        optimizer(nullptr) {
    model->top->to(own);
    fully_shard(*model, {.mesh = mesh});
    optimizer =
        std::make_unique<torch::optim::Adam>(parameters(*model), torch::optim::AdamOptions(1e-2));
  }
  at::Tensor forward(int number) {
    return tessera::forward(model, test::small_batch(own.index(), number)).square().sum();
  }
  float step(int number) {
    const at::Tensor loss = forward(number);
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    return loss.item<float>();
  }

  at::Device own;
  Tables tables;
  test::ModelWithTables model;
  std::unique_ptr<torch::optim::Adam> optimizer;
};

TEST_P(TableFaultsTest, AStepThatThrowsMidwayChangesNothing) {
  for (const bool is_cached : {false, true}) {
    SCOPED_TRACE(is_cached ? "cached" : "all rows on the device");
    test::on_devices(2, [&](const dist::Mesh& mesh) {
      Model trained(mesh, is_cached);
      Model expected(mesh, is_cached);
      for (int number = 0; number < 5; ++number) {
        try {
          const at::Tensor loss = trained.forward(number + 7);
          throw std::runtime_error("the trainer refuses this loss");
        } catch (const std::runtime_error&) {
        }
        const at::Tensor loss = trained.forward(number + 3);
        loss.register_hook([](const at::Tensor& gradient) -> at::Tensor {
          if (gradient.defined()) throw std::runtime_error("a hook throws in the backward");
          return gradient;
        });
        EXPECT_THAT(test::error_of([&] { loss.backward(); }),
                    HasSubstr("a hook throws in the backward"));
        trained.optimizer->zero_grad();
        EXPECT_EQ(trained.step(number), expected.step(number)) << number;
      }
      expect_same_state(trained.tables, expected.tables);
    });
  }
}

// ---- Saves.

TEST_P(TableFaultsTest, ASaveInTheBackgroundOutlivesTablesAndStreams) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "step-3";
  for (const bool is_cached : {false, true}) {
    SCOPED_TRACE(is_cached ? "cached" : "all rows on the device");
    test::on_devices(2, [&](const dist::Mesh& mesh) {
      auto trained = std::make_unique<Model>(mesh, is_cached);
      Model expected(mesh, false);
      for (int number = 0; number < 3; ++number) {
        trained->step(number);
        expected.step(number);
      }
      {
        TrainState state{trained->model, *trained->optimizer};
        save(state, path, {.overwrite = OverwritePolicy::replace, .async = true});
        for (int number = 3; number < 6; ++number) trained->step(number);  // not saved
        trained->tables.reset();
      }
      trained.reset();  // destroys its streams too
      Model loaded(mesh, is_cached);
      loaded.step(9);  // so that rows are on the device
      load(TrainState{loaded.model, *loaded.optimizer}, path);
      expect_same_state(loaded.tables, expected.tables);
      EXPECT_EQ(loaded.step(3), expected.step(3));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, TableFaultsTest, ::testing::ValuesIn(test::accelerator::modes()),
                         test::name_of_mode);

}  // namespace
}  // namespace tessera
