#include "tessera/layout/table_planner.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "base/json.h"
#include "layout/table_costs.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

TableSize table(std::string name, std::int64_t rows, std::int64_t columns) {
  TableSize size;
  size.name = std::move(name);
  size.rows = rows;
  size.columns = columns;
  size.pooling_factor = 10;
  size.state_nbytes_per_row = 4;
  return size;
}

PlannerOptions options(int world_size, std::uint64_t memory_nbytes) {
  PlannerOptions options;
  options.world_size = world_size;
  options.memory_per_rank_nbytes = memory_nbytes;
  return options;
}

/// Returns the message of the Error; an empty text if a plan was proposed.
std::string refusal(const std::vector<TableSize>& tables, const PlannerOptions& options,
                    ErrorKind kind) {
  try {
    propose_plan(tables, options);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
}

double slowest_seconds(const ProposedPlan& proposed) {
  double slowest = 0;
  for (const PlannedRank& rank : proposed.ranks) slowest = std::max(slowest, rank.seconds);
  return slowest;
}

// Shows D10.
TEST(TablePlannerTest, SmallTablesAreReplicatedMiddlingOnesWholeAndLargeOnesCut) {
  const std::vector<TableSize> tables{table("large", 40'000'000, 64), table("small", 100, 16),
                                      table("whole_0", 1'000'000, 64),
                                      table("whole_1", 1'000'000, 64)};
  const ProposedPlan proposed = propose_plan(tables, options(4, 8 * kGiB));
  const auto& rules = proposed.plan.tables;
  EXPECT_EQ(rules.at("small").sharding, TableSharding::data_parallel);
  EXPECT_NE(rules.at("large").sharding, TableSharding::table_wise);
  EXPECT_EQ(rules.at("large").ranks.size(), 4U);
  for (const PlannedRank& rank : proposed.ranks) EXPECT_LE(rank.nbytes, 8 * kGiB);
  ASSERT_EQ(proposed.tables.size(), 4U);
  EXPECT_EQ(proposed.tables[0].name, "large");
  EXPECT_THAT(proposed.tables[0].reason,
              HasSubstr("table_wise: 9.7 GiB on one rank, more than the 8.0 GiB for tables"));
  EXPECT_THAT(proposed.tables[1].reason, HasSubstr("least total time, "));
  EXPECT_EQ(TablePlan::from_json(proposed.plan.to_json(), "plan").to_json(),
            proposed.plan.to_json());
}

// Shows D10.
TEST(TablePlannerTest, OneRankHoldsEverythingWhole) {
  const std::vector<TableSize> tables{table("a", 1000, 32), table("b", 10, 8)};
  const ProposedPlan proposed = propose_plan(tables, options(1, 16 * kMiB));
  for (const auto& [name, rule] : proposed.plan.tables) {
    EXPECT_EQ(rule.sharding, TableSharding::table_wise) << name;
    EXPECT_THAT(rule.ranks, ElementsAre(0)) << name;
  }
}

TEST(TablePlannerTest, NoTablesAndEmptyTablesHaveAPlan) {
  EXPECT_TRUE(propose_plan({}, options(4, 0)).tables.empty());
  const std::vector<TableSize> tables{table("no_rows", 0, 8), table("no_columns", 8, 0)};
  const ProposedPlan proposed = propose_plan(tables, options(2, kMiB));
  EXPECT_EQ(proposed.plan.tables.size(), 2U);
}

// 2 hosts of 2 ranks; per rank 100 samples of 2 features of 3 ids, which are 600 ids in 200 bags.
class CostTest : public ::testing::Test {
 protected:
  CostTest() {
    options_.ranks_per_host = 2;
    options_.batch_size = 100;
    options_.bandwidths = {.random_rows = 1000, .within_host = 100, .between_hosts = 10};
    size_ = table("t", 50, 32);
    size_.num_features = 2;
    size_.pooling_factor = 3;
  }

  ShardingCandidate candidate(TableSharding sharding) {
    TableConstraint constraint;
    constraint.shardings = {sharding};
    constraint.kernel = kernel_;
    for (ShardingCandidate& each : sharding_candidates(size_, constraint, allowed_, options_)) {
      if (each.sharding == sharding) return each;
    }
    return {};
  }

  PlannerOptions options_ = options(4, kGiB);
  TableSize size_;
  TableKernel kernel_ = TableKernel::fused;
  AllowedRanks allowed_{{0, 1, 2, 3}, {0, 1}};
};

// Shows D10.
TEST_F(CostTest, TableWiseTakesAllIdsAndSendsAllOutputs) {
  const ShardingCandidate whole = candidate(TableSharding::table_wise);
  ASSERT_EQ(whole.shards.size(), 1U);
  // 2400 ids: a row of 128 bytes is read twice, written once; a cache line of state read, written.
  const double memory = 2400 * (3 * 128 + 2 * 64) / 1000.0;
  // With each other rank: 600 ids and 200 lengths of 8 bytes, and 2 * 200 * 32 floats of 4 bytes.
  const double nbytes = 600 * 8 + 200 * 8 + 2 * 200 * 32 * 4;
  EXPECT_NEAR(whole.largest_seconds(), memory + nbytes * (1 / 100.0 + 2 / 10.0), 1e-6);
  EXPECT_EQ(whole.largest_nbytes(), 50 * (32 * 4 + 4) + 4 * static_cast<std::uint64_t>(nbytes));
}

// Shows D10.
TEST_F(CostTest, RowShardsTakeTheirIdsAndSendTheWholeWidth) {
  const ShardingCandidate rows = candidate(TableSharding::row_wise);
  ASSERT_EQ(rows.shards.size(), 4U);
  const double ids = 600 * 13 / 50.0;  // 13, 13, 13 and 11 rows
  const double memory = 4 * ids * (3 * 128 + 2 * 64) / 1000.0;
  const double nbytes = ids * 8 + 200 * 8 + 2 * 200 * 32 * 4;
  EXPECT_NEAR(rows.largest_seconds(), memory + nbytes * (1 / 100.0 + 2 / 10.0), 1e-6);
  EXPECT_EQ(rows.largest_nbytes(),
            static_cast<std::uint64_t>(std::ceil(13 * (32 * 4 + 4) + 4 * nbytes)));
  EXPECT_LT(rows.shards.back().nbytes, rows.largest_nbytes());
}

// Shows D10.
TEST_F(CostTest, ColumnShardsTakeAllIdsAndExchangeSumsOfRows) {
  const ShardingCandidate columns = candidate(TableSharding::column_wise);
  ASSERT_EQ(columns.shards.size(), 2U);
  const double memory = 2400 * (3 * 64 + 2 * 64) / 1000.0;
  const double nbytes = 600 * 8 + 200 * 8 + 2 * 200 * 16 * 4;
  const double sums = 4 * 2400 / 10.0;
  EXPECT_NEAR(columns.largest_seconds(), memory + nbytes * (1 / 100.0 + 2 / 10.0) + sums, 1e-6);

  const ShardingCandidate on_a_host = candidate(TableSharding::table_column_wise);
  EXPECT_NEAR(columns.largest_seconds() - on_a_host.largest_seconds(), sums - 4 * 2400 / 100.0,
              1e-6);
}

// Shows D10.
TEST_F(CostTest, GridCutsColumnsOverHostsAndRowsWithin) {
  const ShardingCandidate grid = candidate(TableSharding::grid);
  EXPECT_EQ(grid.num_column_shards, 2);
  EXPECT_EQ(grid.num_hosts, 2);
  ASSERT_EQ(grid.shards.size(), 4U);
  const double ids = 600 * 25 / 50.0;
  const double nbytes = ids * 8 + 200 * 8 + 2 * 200 * 16 * 4;
  EXPECT_EQ(grid.largest_nbytes(), 25 * (16 * 4 + 4) + 4 * static_cast<std::uint64_t>(nbytes));
}

// Shows D10.
TEST_F(CostTest, DataParallelLooksUpItsOwnSamplesAndReducesTheTable) {
  const ShardingCandidate replicas = candidate(TableSharding::data_parallel);
  ASSERT_EQ(replicas.shards.size(), 4U);
  const double memory = (600 * 3 * 128 + 50 * (3 * 128 + 2 * 4)) / 1000.0;
  const double reduce = 2 * 3 / 4.0 * 50 * 128 / 10.0;
  EXPECT_NEAR(replicas.largest_seconds(), memory + reduce, 1e-6);
  EXPECT_EQ(replicas.largest_nbytes(), 50U * (2 * 128 + 4));
}

// Shows D10.
TEST_F(CostTest, ADenseKernelKeepsAGradientAndPassesOverTheShard) {
  const ShardingCandidate fused = candidate(TableSharding::table_wise);
  kernel_ = TableKernel::dense;
  const ShardingCandidate dense = candidate(TableSharding::table_wise);
  EXPECT_EQ(dense.largest_nbytes() - fused.largest_nbytes(), 50U * 128);
  const double pass = 50 * (3 * 128 + 2 * 4) / 1000.0;
  EXPECT_NEAR(dense.largest_seconds() - fused.largest_seconds(), pass - 2400 * 2 * 64 / 1000.0,
              1e-6);
}

// Shows D10.
TEST_F(CostTest, WeightsOfIdsAndStateOfElementsCost) {
  const ShardingCandidate plain = candidate(TableSharding::table_wise);
  size_.is_weighted = true;
  const ShardingCandidate weighted = candidate(TableSharding::table_wise);
  EXPECT_EQ(weighted.largest_nbytes() - plain.largest_nbytes(), 2400U * 4);
  size_.state_nbytes_per_element = 8;
  const ShardingCandidate adam = candidate(TableSharding::table_wise);
  EXPECT_EQ(adam.largest_nbytes() - weighted.largest_nbytes(), 50U * 32 * 8);
  EXPECT_NEAR(adam.largest_seconds() - weighted.largest_seconds(), 2400 * 2 * 256 / 1000.0, 1e-6);
}

/// Tries every candidate on every choice of ranks. Finds the least time of the slowest rank.
class ExhaustiveSearch {
 public:
  ExhaustiveSearch(const std::vector<TableSize>& tables, const PlannerOptions& options,
                   std::uint64_t capacity_nbytes)
      : capacity_nbytes_(capacity_nbytes),
        ranks_per_host_(num_ranks_per_host(options)),
        loads_(static_cast<std::size_t>(options.world_size)) {
    AllowedRanks all;
    all.ranks.resize(loads_.size());
    std::iota(all.ranks.begin(), all.ranks.end(), 0);
    all.hosts.resize(loads_.size() / static_cast<std::size_t>(ranks_per_host_));
    std::iota(all.hosts.begin(), all.hosts.end(), 0);
    for (const TableSize& size : tables) {
      const auto constraint = options.constraints.find(size.name);
      candidates_.push_back(sharding_candidates(
          size, constraint == options.constraints.end() ? TableConstraint{} : constraint->second,
          all, options));
    }
  }

  /// Returns infinity if no plan fits.
  double best_seconds() {
    place(0);
    return best_;
  }

 private:
  void place(std::size_t t) {
    double slowest = 0;
    for (const ShardCost& load : loads_) slowest = std::max(slowest, load.seconds);
    if (slowest >= best_) return;
    if (t == candidates_.size()) {
      best_ = slowest;
      return;
    }
    for (const ShardingCandidate& candidate : candidates_[t]) {
      std::vector<int> ranks;
      place_shards(t, candidate, ranks);
    }
  }

  void place_shards(std::size_t t, const ShardingCandidate& candidate, std::vector<int>& ranks) {
    const std::size_t s = ranks.size();
    if (s == candidate.shards.size()) {
      place(t + 1);
      return;
    }
    const ShardCost& shard = candidate.shards[s];
    for (int rank = 0; rank < static_cast<int>(loads_.size()); ++rank) {
      ShardCost& load = loads_[static_cast<std::size_t>(rank)];
      if (load.nbytes + shard.nbytes > capacity_nbytes_ || !may_follow(candidate, ranks, rank)) {
        continue;
      }
      const ShardCost before = load;
      load = {before.nbytes + shard.nbytes, before.seconds + shard.seconds};
      ranks.push_back(rank);
      place_shards(t, candidate, ranks);
      ranks.pop_back();
      load = before;
    }
  }

  /// Allows only one order of consecutive equal shards, to save time. Refuses a rank taken twice.
  bool may_follow(const ShardingCandidate& candidate, const std::vector<int>& ranks,
                  int rank) const {
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return false;
    if (ranks.empty()) return true;
    const std::size_t s = ranks.size();
    const bool begins_host =
        candidate.num_hosts > 0 &&
        s % (candidate.shards.size() / static_cast<std::size_t>(candidate.num_hosts)) == 0;
    if (begins_host) {
      return std::none_of(ranks.begin(), ranks.end(), [&](int other) {
        return other / ranks_per_host_ == rank / ranks_per_host_;
      });
    }
    if (candidate.num_hosts > 0 && ranks.back() / ranks_per_host_ != rank / ranks_per_host_) {
      return false;
    }
    return candidate.shards[s].nbytes != candidate.shards[s - 1].nbytes || rank > ranks.back();
  }

  std::uint64_t capacity_nbytes_;
  int ranks_per_host_;
  std::vector<std::vector<ShardingCandidate>> candidates_;
  std::vector<ShardCost> loads_;
  double best_ = std::numeric_limits<double>::infinity();
};

// Shows D10.
TEST(TablePlannerTest, CloseToTheBestOfAllPlansOnTinyCases) {
  std::mt19937 random(2);
  const auto pick = [&](int low, int high) {
    return static_cast<int>(low +
                            static_cast<int>(random() % static_cast<unsigned>(high - low + 1)));
  };
  double worst_ratio = 0;
  int num_solved = 0;
  int num_missed = 0;
  for (int i = 0; i < 1000; ++i) {
    SCOPED_TRACE(i);
    std::vector<TableSize> tables;
    PlannerOptions tight = options(pick(2, 4), 0);
    if (tight.world_size == 4) tight.ranks_per_host = 2;
    const int num_tables = pick(1, tight.world_size == 4 ? 4 : 6);
    const bool is_placed_whole = pick(0, 1) == 0;
    for (int t = 0; t < num_tables; ++t) {
      tables.push_back(table("t" + std::to_string(t), std::int64_t{1} << pick(4, 18),
                             std::int64_t{8} << pick(0, 4)));
      tables.back().pooling_factor = pick(1, 40);
      tables.back().state_nbytes_per_element = static_cast<std::uint64_t>(pick(0, 1) * 4);
      if (is_placed_whole) {
        tight.constraints[tables.back().name].shardings = {TableSharding::table_wise,
                                                           TableSharding::row_wise};
      }
    }
    tight.batch_size = 64;
    tight.bandwidths.within_host = pick(0, 1) == 0 ? 1e9 : 20e9;
    // The memory per rank: from too little for all tables to plenty.
    double nbytes = 0;
    for (const TableSize& size : tables)
      nbytes += table_nbytes(size) + 4 * batch_nbytes(size, tight);
    tight.memory_per_rank_nbytes =
        static_cast<std::uint64_t>(nbytes * pick(2, 10) / 8 / tight.world_size) + 64 * 1024;

    std::uint64_t common = 0;
    for (const TableSize& size : tables) {
      common += static_cast<std::uint64_t>(batch_nbytes(size, tight));
    }
    if (common > tight.memory_per_rank_nbytes) continue;
    const double best =
        ExhaustiveSearch(tables, tight, tight.memory_per_rank_nbytes - common).best_seconds();
    try {
      const ProposedPlan proposed = propose_plan(tables, tight);
      ASSERT_TRUE(std::isfinite(best)) << "a plan that is not among all plans";
      worst_ratio = std::max(worst_ratio, slowest_seconds(proposed) / best);
      ++num_solved;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::mismatch);
      num_missed += std::isfinite(best) ? 1 : 0;
    }
  }
  RecordProperty("worst_ratio", std::to_string(worst_ratio));
  RecordProperty("solved", num_solved);
  EXPECT_GT(num_solved, 500);
  EXPECT_EQ(num_missed, 0) << "cases that fit, but were refused";
  EXPECT_LE(worst_ratio, 1.05);
  EXPECT_GE(worst_ratio, 1 - 1e-9);  // no plan can be better than the best one
}

// Shows D10.
TEST(TablePlannerTest, AThousandTablesOn128RanksAreBalanced) {
  std::mt19937 random(7);
  std::vector<TableSize> tables;
  for (int t = 0; t < 1000; ++t) {
    const int exponent = 4 + static_cast<int>(random() % 22);
    tables.push_back(table("t" + std::to_string(t), std::int64_t{1} << exponent,
                           std::int64_t{16} << (random() % 4)));
    tables.back().pooling_factor = 1 + static_cast<double>(random() % 50);
  }
  PlannerOptions large = options(128, 24 * kGiB);
  large.ranks_per_host = 8;
  const auto start = std::chrono::steady_clock::now();
  const ProposedPlan proposed = propose_plan(tables, large);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  RecordProperty("seconds", std::to_string(seconds.count()));
  EXPECT_LT(seconds.count(), 120);  // 0.6 s on an idle machine, 36 s seen with TSan
  double total = 0;
  for (const PlannedRank& rank : proposed.ranks) {
    EXPECT_LE(rank.nbytes, 24 * kGiB);
    total += rank.seconds;
  }
  EXPECT_LT(slowest_seconds(proposed), 1.1 * total / 128);
}

// Shows D10.
TEST(TablePlannerTest, EqualWhateverTheOrderOfTables) {
  std::vector<TableSize> tables;
  for (int t = 0; t < 12; ++t) {
    tables.push_back(table("t" + std::to_string(t), 1000 * (t % 4 + 1), 32));
  }
  const std::string plan = propose_plan(tables, options(3, kGiB)).to_json();
  for (int i = 0; i < 5; ++i) {
    std::shuffle(tables.begin(), tables.end(), std::mt19937(static_cast<unsigned>(i)));
    EXPECT_EQ(propose_plan(tables, options(3, kGiB)).to_json(), plan);
  }
}

// Shows D10.
TEST(TablePlannerTest, ConstraintsHold) {
  const std::vector<TableSize> tables{table("a", 10000, 64), table("b", 10000, 64),
                                      table("c", 10000, 64), table("d", 10000, 64)};
  PlannerOptions constrained = options(4, kGiB);
  constrained.ranks_per_host = 2;
  constrained.constraints["a"].shardings = {TableSharding::row_wise};
  constrained.constraints["a"].ranks = {3, 1};
  constrained.constraints["b"].shardings = {TableSharding::table_row_wise};
  constrained.constraints["b"].ranks = {1, 2, 3};
  constrained.constraints["c"].shardings = {TableSharding::column_wise};
  constrained.constraints["c"].min_columns = 32;
  constrained.constraints["d"].shardings = {TableSharding::grid};
  const ProposedPlan proposed = propose_plan(tables, constrained);
  const auto& rules = proposed.plan.tables;
  EXPECT_EQ(rules.at("a").sharding, TableSharding::row_wise);
  EXPECT_THAT(rules.at("a").ranks, ElementsAre(1, 3));
  EXPECT_EQ(rules.at("b").sharding, TableSharding::table_row_wise);
  EXPECT_THAT(rules.at("b").ranks, ElementsAre(2, 3));
  EXPECT_EQ(rules.at("c").sharding, TableSharding::column_wise);
  EXPECT_EQ(rules.at("c").ranks.size(), 2U);
  EXPECT_EQ(rules.at("d").sharding, TableSharding::grid);
  EXPECT_EQ(rules.at("d").num_column_shards, 2);
  EXPECT_THAT(rules.at("d").ranks, testing::UnorderedElementsAre(0, 1, 2, 3));
  EXPECT_EQ(proposed.tables[0].reason, "its constraint allows nothing else");
}

// Shows D10.
TEST(TablePlannerTest, ReasonsCompareWithTheSameTypeWhereNoOtherIsAllowed) {
  PlannerOptions constrained = options(4, kGiB);
  constrained.constraints["a"].shardings = {TableSharding::column_wise};
  const ProposedPlan proposed =
      propose_plan(std::vector<TableSize>{table("a", 10000, 64)}, constrained);
  EXPECT_THAT(proposed.tables[0].reason,
              AllOf(HasSubstr("column_wise over "), Not(HasSubstr("no other"))));
}

// Shows D10.
TEST(TablePlannerTest, TablesThatAreTooLargeAreNamedWithNumbers) {
  const std::vector<TableSize> tables{table("fits", 1000, 64), table("huge", 40'000'000, 64)};
  EXPECT_THAT(refusal(tables, options(4, kGiB), ErrorKind::mismatch),
              AllOf(HasSubstr("memory of a rank: expected shards of at most "),
                    HasSubstr("found 1 table with larger shards only"),
                    HasSubstr("\n  huge: smallest shard 2"), HasSubstr("row_wise over 4 ranks"),
                    Not(HasSubstr("fits:"))));
}

// Shows D10.
TEST(TablePlannerTest, TablesThatAreTooManyAreNamedWithNumbers) {
  std::vector<TableSize> tables;
  for (int t = 0; t < 12; ++t) {
    tables.push_back(table("t" + std::to_string(t), 2'000'000 + 1000 * t, 64));
  }
  EXPECT_THAT(refusal(tables, options(2, kGiB), ErrorKind::mismatch),
              AllOf(HasSubstr("memory of all ranks: expected tables of at most "),
                    HasSubstr("on each of 2 ranks, found tables of at least "),
                    HasSubstr("\n  t11: at least "), HasSubstr("\n  and 2 more")));
}

// Shows D10.
TEST(TablePlannerTest, TablesThatCannotBePackedAreNamedWithNumbers) {
  const std::vector<TableSize> tables{table("a", 1'000'000, 64), table("b", 1'000'000, 64),
                                      table("c", 1'000'000, 64)};
  PlannerOptions whole = options(2, 400 * kMiB);
  for (const TableSize& each : tables) {
    whole.constraints[each.name].shardings = {TableSharding::table_wise};
  }
  EXPECT_THAT(refusal(tables, whole, ErrorKind::mismatch),
              AllOf(HasSubstr("memory of the ranks: expected room for every table, found 1 table"),
                    HasSubstr("on all ranks together"), HasSubstr("\n  c: smallest shard ")));
  whole.constraints.clear();
  EXPECT_EQ(refusal(tables, whole, ErrorKind::mismatch), "");
}

// Shows D10.
TEST(TablePlannerTest, MemoryForTheBatchAndTheReserveComesFirst) {
  PlannerOptions reserved = options(2, kMiB);
  reserved.reserved_nbytes = 2 * kMiB;
  EXPECT_THAT(refusal({table("a", 10, 16)}, reserved, ErrorKind::mismatch),
              AllOf(HasSubstr("of which 2097152 bytes (2.0 MiB) are reserved and the rest is for "
                              "the batch of the rank"),
                    HasSubstr("found 1048576 bytes (1.0 MiB)")));
  reserved.memory_per_rank_nbytes = std::numeric_limits<std::uint64_t>::max();
  reserved.reserved_nbytes = std::numeric_limits<std::uint64_t>::max();
  EXPECT_THAT(refusal({table("a", 10, 16)}, reserved, ErrorKind::mismatch),
              HasSubstr("memory of a rank"));
  reserved.reserved_nbytes = 0;
  EXPECT_EQ(refusal({table("a", 10, 16)}, reserved, ErrorKind::mismatch), "");
}

// Shows D10.
TEST(TablePlannerTest, ConstraintsThatContradictAreRefused) {
  const std::vector<TableSize> tables{table("a", 100, 64)};
  const auto refused = [&](TableConstraint constraint) {
    PlannerOptions constrained = options(4, kGiB);
    constrained.ranks_per_host = 2;
    constrained.constraints["a"] = std::move(constraint);
    return refusal(tables, constrained, ErrorKind::invalid_argument);
  };
  using enum TableSharding;
  EXPECT_THAT(refused({.shardings = {data_parallel}, .ranks = {0, 1}}),
              AllOf(HasSubstr("a: constraint: expected enough ranks and columns for data_parallel"),
                    HasSubstr("2 of 4 ranks allowed")));
  EXPECT_THAT(refused({.shardings = {table_row_wise, grid}, .ranks = {0, 2}}),
              AllOf(HasSubstr("table_row_wise or grid"), HasSubstr("0 hosts")));
  EXPECT_THAT(refused({.shardings = {column_wise}, .min_columns = 33}),
              AllOf(HasSubstr("column_wise"), HasSubstr("64 columns in shards of at least 33")));
  EXPECT_THAT(refused({.ranks = {0, 4}}),
              HasSubstr("a: constraint ranks: expected ranks from 0 to 3, found 4"));
  EXPECT_THAT(refused({.ranks = {1, 1}}), HasSubstr("each rank once"));
  EXPECT_THAT(refused({.min_columns = 0}), HasSubstr("min_columns"));

  PlannerOptions unknown = options(4, kGiB);
  unknown.constraints["b"] = {};
  EXPECT_THAT(refusal(tables, unknown, ErrorKind::invalid_argument),
              HasSubstr("b: constraint: expected a table of that name, found none"));
}

// Shows D10.
TEST(TablePlannerTest, BadTablesAndOptionsAreRefused) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const auto bad_table = [&](auto change) {
    std::vector<TableSize> tables{table("a", 100, 64)};
    change(tables[0]);
    return refusal(tables, options(4, kGiB), ErrorKind::invalid_argument);
  };
  EXPECT_THAT(bad_table([](TableSize& t) { t.rows = -1; }), HasSubstr("a: rows"));
  EXPECT_THAT(bad_table([](TableSize& t) { t.columns = -5; }), HasSubstr("found -5"));
  EXPECT_THAT(bad_table([](TableSize& t) { t.num_features = 0; }), HasSubstr("a: features"));
  EXPECT_THAT(bad_table([](TableSize& t) { t.rows = t.columns = kHuge; }), HasSubstr("a: table"));
  EXPECT_THAT(bad_table([](TableSize& t) { t.rows = kHuge; }), HasSubstr("at most 1.0 PiB"));
  EXPECT_THAT(bad_table([](TableSize& t) { t.rows = 0, t.columns = kHuge; }),
              HasSubstr("a: ids and outputs"));
  for (const double pooling : {-1.0, kNaN, kInf}) {
    EXPECT_THAT(bad_table([&](TableSize& t) { t.pooling_factor = pooling; }),
                HasSubstr("a: pooling factor"));
  }
  EXPECT_THAT(bad_table([](TableSize& t) { t.pooling_factor = 1e300; }), HasSubstr("a: ids"));
  EXPECT_THAT(bad_table([](TableSize& t) { t.state_nbytes_per_row = ~0ULL; }),
              HasSubstr("a: optimizer state"));
  EXPECT_THAT(bad_table([](TableSize& t) { t.name = ""; }), HasSubstr("a name"));
  EXPECT_THAT(
      refusal({table("a", 1, 1), table("a", 1, 1)}, options(2, kGiB), ErrorKind::invalid_argument),
      HasSubstr("a: table: expected one table of this name, found two"));

  const auto bad_options = [&](auto change) {
    PlannerOptions changed = options(4, kGiB);
    change(changed);
    return refusal({table("a", 100, 64)}, changed, ErrorKind::invalid_argument);
  };
  for (const int world_size : {0, -1, 1 << 20}) {
    EXPECT_THAT(bad_options([&](PlannerOptions& o) { o.world_size = world_size; }),
                HasSubstr("world size: expected 1 to 4096"));
  }
  for (const int ranks : {3, -2, 8}) {
    EXPECT_THAT(bad_options([&](PlannerOptions& o) { o.ranks_per_host = ranks; }),
                HasSubstr("a divisor of the 4 ranks"));
  }
  EXPECT_THAT(bad_options([](PlannerOptions& o) { o.batch_size = 0; }), HasSubstr("batch size"));
  EXPECT_THAT(bad_options([](PlannerOptions& o) { o.batch_size = kHuge; }), HasSubstr("a: ids"));
  for (const double bandwidth : {0.0, -1.0, kNaN, kInf}) {
    EXPECT_THAT(bad_options([&](PlannerOptions& o) { o.bandwidths.random_rows = bandwidth; }),
                HasSubstr("bandwidth of random rows"));
    EXPECT_THAT(bad_options([&](PlannerOptions& o) { o.bandwidths.between_hosts = bandwidth; }),
                HasSubstr("bandwidth between hosts"));
  }
}

// Shows D10.
TEST(TablePlannerTest, NotesSayWhatHoldsForSingleTables) {
  std::vector<TableSize> tables{table("a", 100, 64), table("b", 100, 64)};
  PlannerOptions noted = options(4, kGiB);
  read_table_notes(R"({"schema": 1, "tables": {"a": {"features": 3, "pooling_factor": 2.5,
                       "weighted": true, "sharding": ["row_wise", "grid"], "ranks": [0, 1],
                       "min_columns": 8, "kernel": "dense"}, "b": {}}})",
                   "notes.json", tables, noted);
  EXPECT_EQ(tables[0].num_features, 3);
  EXPECT_EQ(tables[0].pooling_factor, 2.5);
  EXPECT_TRUE(tables[0].is_weighted);
  EXPECT_EQ(tables[1].num_features, 1);
  const TableConstraint& constraint = noted.constraints.at("a");
  EXPECT_THAT(constraint.shardings, ElementsAre(TableSharding::row_wise, TableSharding::grid));
  EXPECT_THAT(constraint.ranks, ElementsAre(0, 1));
  EXPECT_EQ(constraint.min_columns, 8);
  EXPECT_EQ(constraint.kernel, TableKernel::dense);
}

// Shows D10.
TEST(TablePlannerTest, NotesThatAreWrongAreRefusedByNameAndRule) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"colour": 1})", "one of the keys features, pooling_factor"},
      {R"({"features": 0})", "features: expected an integer from 1"},
      {R"({"features": 99999999999999999999})", "features: expected an integer"},
      {R"({"features": true})", "features"},
      {R"({"pooling_factor": -1})", "pooling_factor: expected a number of 0 or more"},
      {R"({"pooling_factor": "2"})", "pooling_factor"},
      {R"({"pooling_factor": 1e999})", ""},
      {R"({"pooling_factor": NaN})", ""},
      {R"({"weighted": 1})", "weighted: expected true or false"},
      {R"({"sharding": []})", "a list of sharding types"},
      {R"({"sharding": ["diagonal"]})", "table_wise, column_wise"},
      {R"({"ranks": [4]})", "from 0 to 3"},
      {R"({"ranks": [1, 1]})", "each rank once"},
      {R"({"min_columns": 0})", "min_columns"},
      {R"({"kernel": "sparse"})", "fused or dense"},
      {R"([])", "an object"},
  };
  for (const auto& [notes, words] : cases) {
    SCOPED_TRACE(notes);
    std::vector<TableSize> tables{table("a", 100, 64)};
    PlannerOptions noted = options(4, kGiB);
    try {
      read_table_notes(R"({"schema": 1, "tables": {"a": )" + std::string(notes) + "}}",
                       "notes.json", tables, noted);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::corruption);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("notes.json: "), HasSubstr(words)));
    }
  }
  std::vector<TableSize> tables{table("a", 100, 64)};
  PlannerOptions noted = options(4, kGiB);
  EXPECT_THROW(
      read_table_notes(R"({"schema": 1, "tables": {"z": {}}})", "notes.json", tables, noted),
      Error);
  EXPECT_THROW(read_table_notes(R"({"schema": 2, "tables": {}})", "notes.json", tables, noted),
               Error);
}

// Shows D10.
TEST(TablePlannerTest, TheExplanationIsTextAndJson) {
  const std::vector<TableSize> tables{table("large", 40'000'000, 64), table("na\"me\n", 100, 16)};
  const ProposedPlan proposed = propose_plan(tables, options(4, 8 * kGiB));
  const std::string text = proposed.to_text();
  EXPECT_THAT(text, HasSubstr("table      sharding"));
  EXPECT_THAT(text, HasSubstr("na\"me\\x0a  data_parallel  [0:4]"));
  EXPECT_THAT(text, HasSubstr("slowest rank "));
  for (const PlannedTable& each : proposed.tables) EXPECT_THAT(text, HasSubstr(each.reason));

  const Value json = parse_json(proposed.to_json(), "explanation");
  const auto* planned = json.find("tables")->get_if<Value::List>();
  ASSERT_NE(planned, nullptr);
  ASSERT_EQ(planned->size(), 2U);
  EXPECT_EQ(*(*planned)[1].find("name"), Value("na\"me\n"));
  EXPECT_EQ(*json.find("plan"), parse_json(proposed.plan.to_json(), "plan"));
}

// Shows D10.
TEST(TablePlannerTest, NarrowTextHasReasonsOnLinesOfTheirOwn) {
  const std::vector<TableSize> tables{table("large", 40'000'000, 64)};
  const ProposedPlan proposed = propose_plan(tables, options(4, 8 * kGiB));
  EXPECT_THAT(proposed.to_text(70), HasSubstr("\n    table_wise: 9.7 GiB"));
  EXPECT_THAT(proposed.to_text(200), Not(HasSubstr("\n    table_wise:")));
}

// Shows D10.
TEST(TablePlannerTest, NarrowTextKeepsTheEndsOfNames) {
  std::string name(100, 'x');
  name +=
      "\xC3\xBC"
      "end";
  const ProposedPlan proposed =
      propose_plan(std::vector<TableSize>{table(name, 100, 16)}, options(2, kGiB));
  const std::string narrow = proposed.to_text(60);
  EXPECT_THAT(narrow, HasSubstr("…xxx"));
  EXPECT_THAT(narrow, HasSubstr("x\xC3\xBC"
                                "end  data_parallel"));
  EXPECT_THAT(narrow, Not(HasSubstr(std::string(60, 'x'))));
  EXPECT_THAT(proposed.to_text(), HasSubstr(name));
}

}  // namespace
}  // namespace tessera
