#include "tessera/layout/strategy.h"

#include <gmock/gmock.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string refusal(std::string_view text, int world_size) {
  try {
    parse_strategy(text, world_size);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(StrategyTest, NamesRoundTrip) {
  for (const char* name : {"replicated", "flat", "dim0", "dim1", "hybrid:2x4", "hybrid-flat:2x4"}) {
    EXPECT_EQ(strategy_to_string(parse_strategy(name, 8)), name);
    EXPECT_EQ(parse_strategy(name, 8).world_size(), 8);
  }
  EXPECT_EQ(parse_strategy("hybrid:3x5", 0).world_size(), 15);
}

TEST(StrategyTest, WhatHasNoMeaningIsRefusedWithBothSides) {
  EXPECT_THAT(refusal("zero3", 4), HasSubstr("found zero3"));
  EXPECT_THAT(refusal("hybrid:2x3", 4), HasSubstr("to be 4, the world size"));
  EXPECT_THAT(refusal("hybrid:2", 4), HasSubstr("two numbers"));
  EXPECT_THAT(refusal("hybrid:0x4", 0), HasSubstr("of 1 or more"));
  EXPECT_THAT(refusal("hybrid:1000000x1000000", 0), HasSubstr("at most"));
  EXPECT_THAT(refusal("dim0", -1), HasSubstr("world size"));
}

// Shows E14.
TEST(StrategyTest, RowsAreCutAsTorchChunkCutsThem) {
  // torch.chunk of 10 rows in 4: 3, 3, 3, 1; of 5 rows in 4: 2, 2, 1 and nothing.
  const auto shards = shards_of(parse_strategy("dim0", 4), Shape{10, 2});
  EXPECT_THAT(shards,
              ElementsAre(Shard{Box{{0, 0}, {3, 2}}, {0}}, Shard{Box{{3, 0}, {3, 2}}, {1}},
                          Shard{Box{{6, 0}, {3, 2}}, {2}}, Shard{Box{{9, 0}, {1, 2}}, {3}}));
  EXPECT_THAT(shards_of(parse_strategy("dim0", 4), Shape{5}), SizeIs(3));
}

TEST(StrategyTest, HybridNumbersRanksAsAMeshOfReplicasByShards) {
  const auto shards = shards_of(parse_strategy("hybrid:2x3", 6), Shape{6});
  EXPECT_THAT(shards, ElementsAre(Shard{Box{{0}, {2}}, {0, 3}}, Shard{Box{{2}, {2}}, {1, 4}},
                                  Shard{Box{{4}, {2}}, {2, 5}}));
}

TEST(StrategyTest, WhatCannotBeCutIsHeldByAll) {
  for (const Shape& shape : {Shape{}, Shape{0, 4}}) {
    const auto shards = shards_of(parse_strategy("dim0", 3), shape);
    EXPECT_THAT(shards, ElementsAre(Shard{whole_box(shape), {0, 1, 2}}));
  }
}

TEST(FlatUnitTest, EveryRankHoldsAsMuchAndTheLastOnesPadding) {
  const FlatUnit unit =
      make_flat_unit("u", DType::float32, {{"a", {3}}, {"b", {0, 2}}, {"c", {2, 2}}});
  EXPECT_EQ(unpadded_numel(unit), 7);
  EXPECT_EQ(sharded_numel(unit, 4), 2);
  EXPECT_EQ(shard_of_parameter(unit, unit.parameters[0], 1, 4), (FlatRange{2, 3}));
  EXPECT_EQ(shard_of_parameter(unit, unit.parameters[2], 1, 4), (FlatRange{0, 1}));
  EXPECT_EQ(shard_of_parameter(unit, unit.parameters[2], 3, 4), (FlatRange{3, 4}));
  EXPECT_EQ(shard_of_parameter(unit, unit.parameters[1], 0, 4).numel(), 0);
}

TEST(FlatUnitTest, JsonNamesWhatIsWrong) {
  const auto parse = [](const std::string& parameters) {
    return flat_units_from_json(
        R"({"schema":1,"units":[{"name":"u","dtype":"float32","parameters":[)" + parameters +
            "]}]}",
        "units.json");
  };
  EXPECT_EQ(parse(R"({"fqn":"a","shape":[2,3]})")[0].parameters[0].shape, (Shape{2, 3}));
  EXPECT_THROW(parse(R"({"fqn":"a","shape":[-1]})"), Error);
  EXPECT_THROW(parse(R"({"fqn":"a","shape":[1]},{"fqn":"a","shape":[1]})"), Error);
  EXPECT_THROW(
      parse(
          R"({"fqn":"a","shape":[4611686018427387904]},{"fqn":"b","shape":[4611686018427387904]})"),
      Error);
  EXPECT_THROW(flat_units_from_json(R"({"schema":2,"units":[]})", "units.json"), Error);
}

}  // namespace
}  // namespace tessera
