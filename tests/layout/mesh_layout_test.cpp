#include "tessera/layout/strategy.h"

#include <gmock/gmock.h>

#include "support/error_matchers.h"
#include "tessera/base/error.h"
#include "tessera/layout/region.h"

namespace tessera {
namespace {

using test::ThrowsError;
using ::testing::ElementsAre;

MeshLayout layout_of(const std::string& mesh, const std::string& placements) {
  return MeshLayout::from_json(R"({"schema": 1, "mesh": )" + mesh +
                                   R"(, "rules": [{"names": "*", "placements": )" + placements +
                                   "}]}",
                               "mesh.json");
}

std::vector<std::string> in_words(const std::vector<Shard>& shards) {
  std::vector<std::string> words;
  for (const Shard& shard : shards) {
    std::string text = region_to_string(shard.region) + " on";
    for (const int rank : shard.ranks) text += " " + std::to_string(rank);
    words.push_back(text);
  }
  return words;
}

TEST(MeshLayoutTest, AxesThatCutDifferentDimensionsMakeAGrid) {
  const MeshLayout layout = layout_of("[2, 2]", R"x(["Shard(0)", "Shard(1)"])x");
  EXPECT_EQ(layout.world_size(), 4);
  EXPECT_THAT(
      in_words(layout.shards_of("w", Shape{3, 5})),
      ElementsAre("[0:2, 0:3] on 0", "[0:2, 3:5] on 1", "[2:3, 0:3] on 2", "[2:3, 3:5] on 3"));
}

// As in PyTorch's _StridedShard: the last axis (tensor parallelism) cuts first.
TEST(MeshLayoutTest, TheLastOfAxesThatCutOneDimensionCutsFirst) {
  const MeshLayout layout = layout_of("[2, 2]", R"x(["Shard(0)", "Shard(0)"])x");
  EXPECT_THAT(in_words(layout.shards_of("w", Shape{8})),
              ElementsAre("[0:2] on 0", "[2:4] on 2", "[4:6] on 1", "[6:8] on 3"));
}

TEST(MeshLayoutTest, ReplicatesNameAllTheirRanks) {
  const MeshLayout layout = layout_of("[2, 2]", R"x(["Replicate", "Shard(0)"])x");
  EXPECT_THAT(in_words(layout.shards_of("w", Shape{3})),
              ElementsAre("[0:2] on 0 2", "[2:3] on 1 3"));
}

TEST(MeshLayoutTest, AStageIsOnTheRanksOfOneIndex) {
  const MeshLayout layout = layout_of("[3, 2]", R"x(["Stage(1)", "Shard(0)"])x");
  EXPECT_THAT(in_words(layout.shards_of("w", Shape{4})), ElementsAre("[0:2] on 2", "[2:4] on 3"));
}

TEST(MeshLayoutTest, AllRanksHaveWhatCannotBeCut) {
  const MeshLayout layout = layout_of("[2]", R"x(["Shard(0)"])x");
  EXPECT_THAT(in_words(layout.shards_of("step", Shape{})), ElementsAre("[] on 0 1"));
  EXPECT_EQ(layout.shards_of("empty", Shape{0, 3}).front().ranks.size(), 2U);
}

TEST(MeshLayoutTest, ShortTensorsLeaveTheLastRanksWithoutAPart) {
  const MeshLayout layout = layout_of("[4]", R"x(["Shard(0)"])x");
  EXPECT_THAT(in_words(layout.shards_of("w", Shape{2})), ElementsAre("[0:1] on 0", "[1:2] on 1"));
}

TEST(MeshLayoutTest, TheFirstRuleThatMatchesIsUsed) {
  const MeshLayout layout = MeshLayout::from_json(
      R"x({"schema": 1, "mesh": [2], "rules": [{"names": "a.*", "placements": ["Shard(1)"]},
          {"names": "a.b", "placements": ["Shard(0)"]}]})x",
      "mesh.json");
  EXPECT_THAT(in_words(layout.shards_of("a.b", Shape{2, 2})),
              ElementsAre("[0:2, 0:1] on 0", "[0:2, 1:2] on 1"));
  EXPECT_THAT(
      [&] { layout.shards_of("b", Shape{2}); },
      ThrowsError(
          ErrorKind::invalid_argument,
          "mesh.json: b: rules of the mesh: expected a rule whose names match, such as a last "
          "rule for *, found none"));
  EXPECT_THAT(
      [&] { layout.shards_of("a.c", Shape{2}); },
      ThrowsError(ErrorKind::invalid_argument,
                  "mesh.json: a.c: rules of the mesh: expected a dimension of the shape [2], found "
                  "Shard(1) for 'a.*'"));
}

struct BadFile {
  std::string text;
  std::string error;
};

TEST(MeshLayoutTest, RefusesFilesThatDoNotSayWhatTheyMean) {
  const std::string rules = R"("rules": [{"names": "*", "placements": ["Replicate"]}])";
  for (const BadFile& bad : std::vector<BadFile>{
           {"[]", "mesh.json: mesh layout: expected an object"},
           {R"({"schema": 2, "mesh": [1], )" + rules + "}", "schema: expected 1, found 2"},
           {R"({"schema": 1, "mesh": [1], "rule": [], )" + rules + "}",
            "members: expected only schema, mesh and rules, found 'rule'"},
           {R"({"schema": 1, )" + rules + "}", "mesh: expected a member of this name, found none"},
           {R"({"schema": 1, "mesh": [], )" + rules + "}", "mesh: expected a list of 1 to 8 sizes"},
           {R"({"schema": 1, "mesh": [0], )" + rules + "}", "mesh: expected sizes of 1 or more"},
           {R"({"schema": 1, "mesh": [1000000, 2], )" + rules + "}",
            "whose product is at most 1000000"},
           {R"({"schema": 1, "mesh": [1], "rules": []})", "rules: expected a list of one rule"},
           {R"({"schema": 1, "mesh": [1, 1], )" + rules + "}",
            "rule 0: placements: expected a list of 2, one for each axis"},
       }) {
    EXPECT_THAT([&] { MeshLayout::from_json(bad.text, "mesh.json"); },
                ThrowsError(ErrorKind::corruption, bad.error));
  }
  for (const auto& [placement, error] : std::vector<std::pair<std::string, std::string>>{
           {R"x("shard(0)")x", "expected Replicate, Shard(dimension) or Stage(index)"},
           {R"x("Shard()")x", "expected Replicate, Shard(dimension) or Stage(index)"},
           {R"x("Shard(0x)")x", "expected Replicate, Shard(dimension) or Stage(index)"},
           {R"x("Shard(-1)")x", "rule 0: placement: expected a number from 0 to 63"},
           {R"x("Stage(2)")x", "rule 0: placement: expected a number from 0 to 1"},
           {"0", "expected Replicate, Shard(dimension) or Stage(index), found 0"},
       }) {
    const auto parse = [&, p = placement] { layout_of("[2]", "[" + p + "]"); };
    EXPECT_THAT(parse, ThrowsError(ErrorKind::corruption, error));
  }
}

}  // namespace
}  // namespace tessera
