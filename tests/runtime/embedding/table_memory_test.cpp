#include <torch/torch.h>

#include "runtime/embedding/tables.h"
#include "runtime/support/counting_allocator.h"
#include "runtime/support/ranks.h"
#include "support/temporary_directory.h"
#include "tessera/runtime/embedding/plan_tables.h"
#include "tessera/runtime/state/train_state.h"

// Shows D7. A rank takes memory for its shard, its state, and the buffers of a step.

namespace tessera {
namespace {

constexpr std::int64_t kRows = 40'000;
constexpr std::int64_t kColumns = 64;
constexpr std::int64_t kTableNbytes = kRows * kColumns * 4;  // 10 MB
constexpr std::int64_t kSlack = 64 << 10;                    // headers, empty shards

EmbeddingBagConfig big_table(std::int64_t num_rows = kRows) {
  EmbeddingBagConfig table;
  table.name = "big";
  table.num_embeddings = num_rows;
  table.embedding_dim = kColumns;
  table.feature_names = {"f"};
  return table;
}

KeyedJaggedTensor batch_of(std::int64_t num_samples, int rank) {
  const at::Tensor ids = torch::arange(num_samples * 3).mul(7 + rank).remainder(kRows);
  return KeyedJaggedTensor::from_lengths({"f"}, ids, torch::full({num_samples}, 3, at::kLong));
}

// Shows D7.
TEST(TableMemoryTest, ARankTakesItsShardItsStateAndTheBuffersOfAStep) {
  for (const TableSharding sharding : {TableSharding::row_wise, TableSharding::column_wise}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      at::set_num_threads(1);
      const EmbeddingBagCollection whole({big_table()}, {.device = at::kMeta});
      TablePlan plan;
      plan.world_size = 2;
      plan.tables["big"] = {sharding, {0, 1}};
      const std::int64_t before = test::allocated_memory().now;
      test::reset_peak();
      const auto tables = shard(whole, plan, mesh, {.optimizer = embedding::Adagrad{}});
      const std::int64_t held = test::allocated_memory().now - before;
      EXPECT_LE(held, kTableNbytes + kSlack) << "half the table, and as much of state";
      EXPECT_LE(test::allocated_memory().peak - before, kTableNbytes + kSlack);

      // Ids as int64: two copies kept, two in messages. Outputs and gradients: sent and received.
      constexpr std::int64_t kSamples = 200;
      constexpr std::int64_t kWorkspace =
          4 * 2 * kSamples * (3 + 1) * 8 + 8 * 2 * kSamples * kColumns * 4;
      const std::int64_t at_start = test::allocated_memory().now;
      for (int step = 0; step < 20; ++step) {
        test::reset_peak();
        tables->forward(batch_of(kSamples, mesh.rank())).values().sum().backward();
        // Gloo's threads free what was sent a little later.
        EXPECT_LE(test::allocated_memory().peak - at_start, kWorkspace + kSlack) << step;
      }
    });
  }
}

// Shows D7.
TEST(TableMemoryTest, DestroyedTablesFreeTheirMemoryAtOnce) {
  const dist::Mesh alone;
  const EmbeddingBagCollection whole({big_table()}, {.device = at::kMeta});
  TablePlan plan;
  plan.tables["big"] = {TableSharding::table_wise, {0}};
  const std::int64_t before = test::allocated_memory().now;
  shard(whole, plan, alone, {.optimizer = embedding::Adagrad{}}).reset();
  EXPECT_LE(test::allocated_memory().now - before, kSlack);
}

// Shows D7.
TEST(TableMemoryTest, APlanCountsGradientAndStateOfADenseTable) {
  at::set_num_threads(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
    constexpr std::int64_t kSamples = 200;
    EmbeddingBagConfig table = big_table();
    table.dtype = dtype;
    const dist::Mesh alone;
    const ProposedPlan proposed =
        embedding::plan({table}, alone,
                        {.memory_per_rank = 1_GiB,
                         .batch_size = kSamples,
                         .pooling_factors = {{"big", 3}},
                         .dense_state_nbytes_per_element = static_cast<std::uint64_t>(item)});
    const std::int64_t before = test::allocated_memory().now;
    test::reset_peak();
    const EmbeddingBagCollection whole({table}, {.device = at::kMeta});
    const auto tables = shard(whole, proposed.plan, alone);
    torch::optim::SGD optimizer(tables->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      tables->forward(batch_of(kSamples, 0)).values().sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const std::int64_t peak = test::allocated_memory().peak - before;
    const auto counted = static_cast<std::int64_t>(proposed.ranks.front().nbytes);
    EXPECT_LE(peak, counted + kSlack) << dtype;
    EXPECT_GE(peak, counted - counted / 20) << dtype << ": and not much more";
  }
}

// Shows E10.
TEST(TableMemoryTest, SavingAndLoadingUnderAnotherPlanGatherNoTable) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/saved";
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    const EmbeddingBagCollection whole({big_table(10 * kRows)}, {.device = at::kMeta});
    constexpr std::int64_t kBuffers = 16 << 20;  // a rank's shard is three times as large
    TablePlan plan;
    plan.world_size = 2;
    for (const TableSharding sharding : {TableSharding::row_wise, TableSharding::column_wise}) {
      plan.tables["big"] = {sharding, {0, 1}};
      const auto tables = shard(whole, plan, mesh, {.optimizer = embedding::RowWiseAdagrad{}});
      TrainState state(tables);
      const std::int64_t before = test::allocated_memory().now;
      test::reset_peak();
      if (sharding == TableSharding::row_wise) {
        save(state, path, {.memory_nbytes = kBuffers});
      } else {
        load(state, path, {.memory_nbytes = kBuffers});
      }
      EXPECT_LE(test::allocated_memory().peak - before, kBuffers);
    }
  });
}

}  // namespace
}  // namespace tessera
