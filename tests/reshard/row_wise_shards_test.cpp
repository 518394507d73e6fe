#include "reshard/row_wise_shards.h"

#include <gmock/gmock.h>

namespace tessera::reshard {
namespace {

using ::testing::ElementsAre;

TEST(RowWiseShardsTest, ARowLiesWhereItsFirstElementLies) {
  const Shape parameter{5, 4};
  const std::vector<Shard> flat{
      {FlatRange{0, 6}, {0}}, {FlatRange{6, 8}, {1}}, {FlatRange{8, 20}, {2}}};
  // Row 1 begins at element 4, on rank 0. No row begins on rank 1.
  EXPECT_THAT(row_wise_shards(flat, parameter, Shape{5}),
              ElementsAre(Shard{Box{{0}, {2}}, {0}}, Shard{Box{{2}, {3}}, {2}}));
  const std::vector<Shard> columns{{Box{{0, 0}, {5, 1}}, {3}}, {Box{{0, 1}, {5, 3}}, {1}}};
  EXPECT_THAT(row_wise_shards(columns, parameter, Shape{5, 1}),
              ElementsAre(Shard{Box{{0, 0}, {5, 1}}, {3}}));
}

TEST(RowWiseShardsTest, ColumnWidthsComeInOrderOfColumnNotOfRank) {
  const std::vector<Region> regions{Box{{0, 5}, {6, 3}}, Box{{0, 0}, {3, 5}}, Box{{3, 0}, {3, 5}}};
  EXPECT_THAT(column_widths(regions, Shape{6, 8}), ElementsAre(5, 3));
  EXPECT_THAT(column_widths({}, Shape{6, 8}), ElementsAre(8));
}

// Shows D9.
TEST(RowWiseShardsTest, BoxesThatAreNoColumnsFromTopToBottomAreNoColumnShards) {
  // A flat range cut into boxes: the end of row 0, rows 1 to 4, the beginning of row 5.
  const std::vector<Region> range{Box{{0, 3}, {1, 5}}, Box{{1, 0}, {4, 8}}, Box{{5, 0}, {1, 2}}};
  EXPECT_THAT(column_widths(range, Shape{6, 8}), ElementsAre(8));
  const std::vector<Region> hole{Box{{0, 0}, {6, 2}}, Box{{0, 4}, {6, 4}}};
  EXPECT_THAT(column_widths(hole, Shape{6, 8}), ElementsAre(8));
}

// Shows D9.
TEST(RowWiseShardsTest, RowBlocksFollowTheShardsOfTheTable) {
  // A grid of 5 rows and 8 columns: column shards over hosts, rows over the ranks of each.
  const std::vector<Shard> grid{{Box{{0, 4}, {3, 4}}, {2}},
                                {Box{{3, 4}, {2, 4}}, {3}},
                                {Box{{0, 0}, {3, 4}}, {0}},
                                {Box{{3, 0}, {2, 4}}, {1}}};
  EXPECT_THAT(shards_of_row_blocks(grid, Shape{5, 8}),
              ElementsAre(Shard{Box{{5}, {3}}, {2}}, Shard{Box{{8}, {2}}, {3}},
                          Shard{Box{{0}, {3}}, {0}}, Shard{Box{{3}, {2}}, {1}}));
}

}  // namespace
}  // namespace tessera::reshard
