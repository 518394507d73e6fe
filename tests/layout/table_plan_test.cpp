#include "tessera/layout/table_plan.h"

#include <gmock/gmock.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string plan_json(const std::string& rule) {
  return R"({"schema":1,"world_size":4,"tables":{"t0":)" + rule + "}}";
}

std::vector<Shard> shards(const std::string& rule, const Shape& shape) {
  const TablePlan plan = TablePlan::from_json(plan_json(rule), "plan.json");
  return table_shards(plan.tables.at("t0"), shape, plan.world_size);
}

// Shows D7.
TEST(TablePlanTest, EveryShardingCoversTheTableOnce) {
  for (const char* rule :
       {R"({"sharding":"data_parallel"})", R"({"sharding":"table_wise","ranks":[2]})",
        R"({"sharding":"column_wise","ranks":[3,0,1]})",
        R"({"sharding":"row_wise","ranks":[0,1,2,3]})",
        R"({"sharding":"table_row_wise","ranks":[2,3]})",
        R"({"sharding":"table_column_wise","ranks":[0,1]})",
        R"({"sharding":"grid","ranks":[0,1,2,3],"column_shards":2})"}) {
    for (const Shape& shape : {Shape{7, 8}, Shape{3, 5}, Shape{1, 1}, Shape{2, 9}}) {
      SCOPED_TRACE(std::string(rule) + shape_to_string(shape));
      std::vector<Region> regions;
      for (const Shard& shard : shards(rule, shape)) regions.push_back(shard.region);
      EXPECT_THAT(check_coverage(regions, shape), IsEmpty());
    }
  }
}

TEST(TablePlanTest, GridGroupsRanksByColumns) {
  EXPECT_THAT(shards(R"({"sharding":"grid","ranks":[0,1,2,3],"column_shards":2})", {4, 6}),
              ElementsAre(Shard{Box{{0, 0}, {2, 3}}, {0}}, Shard{Box{{2, 0}, {2, 3}}, {1}},
                          Shard{Box{{0, 3}, {2, 3}}, {2}}, Shard{Box{{2, 3}, {2, 3}}, {3}}));
}

TEST(TablePlanTest, FewerRowsThanRanksLeavesRanksEmpty) {
  EXPECT_THAT(shards(R"({"sharding":"row_wise","ranks":[3,2,1,0]})", {2, 5}),
              ElementsAre(Shard{Box{{0, 0}, {1, 5}}, {3}}, Shard{Box{{1, 0}, {1, 5}}, {2}}));
}

TEST(TablePlanTest, RefusalsNameFileTableAndBothSides) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"sharding":"diagonal","ranks":[0]})", "table_wise, column_wise"},
      {R"({"sharding":"row_wise"})", "a list of ranks"},
      {R"({"sharding":"row_wise","ranks":[]})", "a list of ranks"},
      {R"({"sharding":"row_wise","ranks":[0,4]})", "from 0 to 3"},
      {R"({"sharding":"row_wise","ranks":[1,1]})", "each rank once"},
      {R"({"sharding":"table_wise","ranks":[0,1]})", "1 rank"},
      {R"({"sharding":"grid","ranks":[0,1,2],"column_shards":2})", "divisor of the 3 ranks"},
      {R"({"sharding":"row_wise","ranks":[0],"colour":1})",
       "one of the keys sharding, ranks or column_shards"},
      {R"({"sharding":"row_wise","ranks":[0,1],"column_shards":"two"})", "only a grid"},
      {R"({"sharding":"data_parallel","ranks":"all"})", "a list of ranks"},
      {R"({"sharding":"data_parallel","ranks":[0,1]})", "all ranks, or no key 'ranks'"},
  };
  for (const auto& [rule, words] : cases) {
    SCOPED_TRACE(rule);
    try {
      TablePlan::from_json(plan_json(rule), "plan.json");
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("plan.json: t0: "));
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  }
}

// Shows D10.
TEST(TablePlanTest, JsonRoundTrips) {
  const TablePlan plan = TablePlan::from_json(
      plan_json(R"({"sharding":"grid","ranks":[0,1,2,3],"column_shards":2})"), "plan.json");
  EXPECT_EQ(TablePlan::from_json(plan.to_json(), "again").to_json(), plan.to_json());
}

// Shows D10.
TEST(TablePlanTest, JsonHasEveryTableUnderItsOwnName) {
  TablePlan plan;
  plan.world_size = 2;
  for (const char* name : {"$dict", "$t", "a.b", "line\nbreak", "quote\"", "\xC3\xBC", ""}) {
    plan.tables[name] = {.sharding = TableSharding::row_wise, .ranks = {1, 0}};
  }
  const TablePlan again = TablePlan::from_json(plan.to_json(), "again");
  EXPECT_EQ(again.to_json(), plan.to_json());
  ASSERT_EQ(again.tables.size(), plan.tables.size());
  for (const auto& [name, rule] : plan.tables) EXPECT_TRUE(again.tables.contains(name)) << name;
}

// Shows D10.
TEST(TablePlanTest, ShardingNamesAreReadBack) {
  EXPECT_EQ(parse_table_sharding(table_sharding_name(TableSharding::grid)), TableSharding::grid);
  EXPECT_EQ(parse_table_sharding("GRID"), std::nullopt);
  EXPECT_THAT(table_sharding_names(), HasSubstr("table_wise, column_wise"));
}

TEST(TablePlanTest, TableNamesComeFromTheWeightsName) {
  EXPECT_EQ(table_of_weight("model.sparse.ebc.embedding_bags.t0.weight"), "t0");
  EXPECT_EQ(table_of_weight("embeddings.user.id.weight"), "user.id");
  EXPECT_EQ(table_of_weight("model.embedding_bags.t0.bias"), std::nullopt);
  EXPECT_EQ(table_of_weight("model.myembeddings.t0.weight"), std::nullopt);
}

}  // namespace
}  // namespace tessera
