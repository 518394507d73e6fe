#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>

#include "runtime/embedding/tables.h"
#include "runtime/support/checks.h"
#include "tessera/base/error.h"
#include "tessera/runtime/embedding/input_pipeline.h"

// Shows D7, D8. How ids reach the ranks that hold their rows, and which batches are refused.

namespace tessera {
namespace {

using test::error_of;
using test::longs;
using test::sharded_collection;
using testing::AllOf;
using testing::HasSubstr;

/// A batch of one sample with one id for each feature: `id` for "city", 1 for the others.
KeyedJaggedTensor one_city(std::int64_t id) {
  return KeyedJaggedTensor::from_lengths({"user", "item", "city", "day"}, longs({1, 1, id, 1}),
                                         longs({1, 1, 1, 1}));
}

// Shows D8.
TEST(InputExchangeTest, IdsOutOfRangeAreRefusedByTableFeatureSampleAndPosition) {
  auto alone = test::small_collection();
  for (const std::int64_t id : {std::int64_t{3}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    EXPECT_THAT(error_of([&] { alone.forward(one_city(id)); }),
                AllOf(HasSubstr("cities"), HasSubstr("feature 'city', sample 0, position 0"),
                      HasSubstr("expected a row of the table, 0 to 2"),
                      HasSubstr("found id " + std::to_string(id))));
  }
  const auto later = KeyedJaggedTensor::from_lengths({"user", "item", "city", "day"},
                                                     longs({1, 1, 1, 1, 0, 1, 2, 9, 1, 1}),
                                                     longs({1, 1, 1, 1, 1, 3, 1, 1}));
  EXPECT_THAT(error_of([&] { alone.forward(later); }),
              HasSubstr("feature 'city', sample 1, position 2"));
}

// Shows D8.
TEST(InputExchangeTest, WhatOneRankRefusesIsAnErrorOnAll) {
  for (const std::string plan : {"row_wise", "table_wise", "data_parallel"}) {
    test::on_ranks(3, [&](const dist::Mesh& mesh) {
      const auto tables = sharded_collection(mesh, plan);
      const std::string refusal =
          error_of([&] { tables->forward(one_city(mesh.rank() == 1 ? 3 : 2)); });
      if (mesh.rank() == 1) {
        EXPECT_THAT(refusal, HasSubstr("feature 'city', sample 0, position 0"));
      } else {
        EXPECT_THAT(refusal, HasSubstr("an invalid batch on rank 1"));
      }
      // The next batch is accepted.
      EXPECT_EQ(tables->forward(one_city(1)).values().size(0), 1);
    });
  }
}

// Shows D7.
TEST(InputExchangeTest, MissingFeaturesAreRefusedOrEmpty) {
  const auto batch = KeyedJaggedTensor::from_lengths({"user", "day"}, longs({1, 1}), longs({1, 1}));
  auto alone = test::small_collection();
  EXPECT_THAT(error_of([&] { alone.forward(batch); }),
              AllOf(HasSubstr("users"), HasSubstr("'item' in the batch")));
  EmbeddingBagCollectionOptions options;
  options.missing_feature = EmbeddingBagCollectionOptions::MissingFeature::empty;
  EmbeddingBagCollection lenient(test::small_tables(), options);
  const KeyedTensor expected = lenient.forward(batch);
  EXPECT_TRUE(torch::equal(expected["item"], torch::zeros({1, 8})));
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    for (const test::PlanKind& kind : test::plan_kinds()) {
      const auto tables = shard(lenient, test::plan_of(kind, 2), mesh);
      EXPECT_TRUE(torch::allclose(tables->forward(batch).values(), expected.values())) << kind.name;
    }
  });
}

// Shows D8.
TEST(InputExchangeTest, WeightsAreAskedForOrRefused) {
  auto alone = test::small_collection();
  const auto weighted = test::small_batch(0, 0, {.is_weighted = true});
  EXPECT_THAT(error_of([&] { alone.forward(weighted); }), HasSubstr("weights of a batch"));
  auto wants_weights = test::small_collection({.is_weighted = true});
  EXPECT_THAT(error_of([&] { wants_weights.forward(test::small_batch(0, 0)); }),
              HasSubstr("the collection is weighted"));
}

// Shows D7.
TEST(InputExchangeTest, TablesAndPlansThatDoNotFitAreRefusedByName) {
  const dist::Mesh alone;
  const auto collection = test::small_collection();
  const TablePlan plan = test::plan_of(test::plan_kind("table_wise"), 1);
  TablePlan less = plan;
  less.tables.erase("days");
  EXPECT_THAT(error_of([&] { shard(collection, less, alone); }),
              AllOf(HasSubstr("days"), HasSubstr("none for this table")));
  TablePlan more = plan;
  more.tables["other"] = {TableSharding::table_wise, {0}};
  EXPECT_THAT(error_of([&] { shard(collection, more, alone); }), HasSubstr("other"));
  EXPECT_THAT(
      error_of([&] { shard(collection, test::plan_of(test::plan_kind("grid"), 2), alone); }),
      HasSubstr("the 1 ranks of the mesh"));
  TablePlan wrong_rank = plan;
  wrong_rank.tables["days"].ranks = {1};
  EXPECT_THAT(error_of([&] { shard(collection, wrong_rank, alone); }),
              HasSubstr("rank in the rule of a table"));
  EXPECT_THAT(error_of([&] {
                shard(collection, plan, alone, {.kernel = {{"days", Kernel::fused}}});
              }),
              HasSubstr("the fused kernel without an optimizer"));
  EXPECT_THAT(error_of([&] {
                shard(collection, plan, alone, {.kernel = {{"dais", Kernel::dense}}});
              }),
              HasSubstr("dais"));
  const auto table = [](std::string name, std::int64_t rows, std::int64_t columns) {
    EmbeddingBagConfig config;
    config.name = std::move(name);
    config.num_embeddings = rows;
    config.embedding_dim = columns;
    config.feature_names = {"f"};
    return config;
  };
  EXPECT_THAT(error_of([&] { EmbeddingBagCollection({table("a.b", 1, 1)}); }),
              HasSubstr("without dots"));
  EXPECT_THAT(error_of([&] { EmbeddingBagCollection({table("a", -1, 1)}); }),
              HasSubstr("num_embeddings"));
  EXPECT_THAT(error_of([&] {
                EmbeddingBagCollection({table("a", std::numeric_limits<std::int64_t>::max(), 64)});
              }),
              HasSubstr("a: num_embeddings: expected at most 9007199254740992 rows of 64 columns, "
                        "found 9223372036854775807"));
  EXPECT_THAT(error_of([&] { EmbeddingBagCollection({table("a", 1, 0)}); }),
              HasSubstr("embedding_dim"));
  EXPECT_THAT(error_of([&] {
                EmbeddingBagCollection({table("a", 1, 1), table("a", 1, 1)});
              }),
              HasSubstr("a second table of this name"));
}

// Shows D7.
TEST(InputExchangeTest, BytesBetweenRanksAreThoseOfTheFormula) {
  constexpr std::uint64_t kRanks = 2;
  test::on_ranks(kRanks, [](const dist::Mesh& mesh) {
    const auto tables =
        sharded_collection(mesh, "table_wise");  // users, days on rank 0; others on rank 1
    const auto batch = test::small_batch(mesh.rank(), 0);
    const auto num_samples = static_cast<std::uint64_t>(batch.batch_size());
    std::uint64_t num_ids = 2 * static_cast<std::uint64_t>(batch["user"].values().numel());
    for (const std::string feature : {"item", "city", "day"}) {
      num_ids += static_cast<std::uint64_t>(batch[feature].values().numel());
    }
    const auto other_samples =
        static_cast<std::uint64_t>(test::small_batch_size(1 - mesh.rank(), 0));
    const std::uint64_t own_width = mesh.rank() == 0 ? 8 + 8 + 4 : 5 + 7;
    const dist::Traffic before = mesh.world()->traffic();
    const KeyedTensor pooled = tables->forward(batch);
    const dist::Traffic forward = mesh.world()->traffic();
    EXPECT_EQ(forward.all_gather - before.all_gather, kRanks * (3 + kRanks) * 8);
    EXPECT_EQ(forward.all_to_all - before.all_to_all,
              8 * (5 * num_samples + num_ids) + 4 * (num_samples + other_samples) * own_width);
    test::loss_of(pooled.values()).backward();
    const dist::Traffic backward = mesh.world()->traffic();
    EXPECT_EQ(backward.all_to_all - forward.all_to_all, 4 * num_samples * (8 + 8 + 5 + 4 + 7));
    EXPECT_EQ(backward.all_gather, forward.all_gather);
    EXPECT_EQ(backward.all_reduce, before.all_reduce);
  });
}

// Shows D7.
TEST(InputExchangeTest, BatchesInAPipelineGiveWhatTheyGiveOneByOne) {
  test::on_ranks(3, [](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    const auto plain = sharded_collection(mesh, "mixed");
    const auto piped = sharded_collection(mesh, "mixed");
    int next = 0;
    InputPipeline<int> batches(
        piped,
        [&]() -> std::optional<int> { return next < 5 ? std::optional(next++) : std::nullopt; },
        [&](const int& step) { return test::small_batch(mesh.rank(), step); });
    int num_steps = 0;
    while (auto item = batches.next()) {
      EXPECT_EQ(item->batch, num_steps);
      EXPECT_GE(next, std::min(5, num_steps + 2)) << "the next batch is under way";
      const KeyedTensor pooled = piped->forward(std::move(item->input));
      const KeyedTensor expected = plain->forward(test::small_batch(mesh.rank(), num_steps));
      EXPECT_TRUE(torch::equal(pooled.values(), expected.values())) << num_steps;
      test::loss_of(pooled.values()).backward();
      test::loss_of(expected.values()).backward();
      ++num_steps;
    }
    EXPECT_EQ(num_steps, 5);
    EXPECT_FALSE(batches.next());
  });
}

// Shows D8.
TEST(InputExchangeTest, WhatABackwardCannotDoIsRefused) {
  FusedEmbeddingBagCollection tables(test::small_tables(), embedding::Sgd{.lr = 0.1});
  const auto loss = test::loss_of(tables.forward(test::small_batch(0, 0)).values());
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("retain_graph does not work here"));
  const auto other = test::loss_of(tables.forward(test::small_batch(0, 0)).values());
  EXPECT_THAT(error_of([&] { other.backward({}, true, /*create_graph=*/true); }),
              HasSubstr("create_graph"));
}

// Shows D8.
TEST(InputExchangeTest, NothingIsUpdatedWhereNoGradientIsWanted) {
  FusedEmbeddingBagCollection tables(test::small_tables(), embedding::Sgd{.lr = 0.1});
  const at::Tensor before = tables.weight("users").detach().clone();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(tables.forward(test::small_batch(0, 0)).values().requires_grad());
  }
  tables.weight("users").requires_grad_(false);
  const auto pooled = tables.forward(test::small_batch(0, 0));
  const at::Tensor days = tables.weight("days").detach().clone();
  test::loss_of(pooled.values()).backward();
  EXPECT_TRUE(torch::equal(tables.weight("users"), before)) << "frozen";
  EXPECT_FALSE(torch::equal(tables.weight("days"), days));
}

}  // namespace
}  // namespace tessera
