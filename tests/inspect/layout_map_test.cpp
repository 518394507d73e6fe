#include "inspect/layout_map.h"

#include <gtest/gtest.h>

namespace tessera::inspect {
namespace {

using formats::Piece;

formats::TensorEntry table(std::vector<Piece> pieces) {
  formats::TensorEntry entry;
  entry.meta = {"model.ebc.embedding_bags.t0.weight", DType::float32, {4, 6}};
  entry.pieces = std::move(pieces);
  return entry;
}

// Shows D10.
TEST(LayoutMapTest, TablesHaveTheShardingTypeThatTheirPiecesTell) {
  EXPECT_EQ(table_sharding(table({{Box{{0, 0}, {2, 6}}, 0}, {Box{{2, 0}, {2, 6}}, 1}})),
            TableSharding::row_wise);
  EXPECT_EQ(table_sharding(table({{Box{{0, 0}, {4, 3}}, 1}, {Box{{0, 3}, {4, 3}}, 0}})),
            TableSharding::column_wise);
  EXPECT_EQ(table_sharding(table({{Box{{0, 0}, {2, 3}}, 0},
                                  {Box{{2, 0}, {2, 3}}, 1},
                                  {Box{{0, 3}, {2, 3}}, 2},
                                  {Box{{2, 3}, {2, 3}}, 3}})),
            TableSharding::grid);
  const Box whole{{0, 0}, {4, 6}};
  EXPECT_EQ(table_sharding(table({{whole, 0}, {whole, 1}})), TableSharding::data_parallel);
}

// Shows D10.
TEST(LayoutMapTest, NoShardingTypeIsGuessed) {
  const Box whole{{0, 0}, {4, 6}};
  EXPECT_EQ(table_sharding(table({{whole, 0}})), std::nullopt);  // or a replica stored once
  EXPECT_EQ(table_sharding(table({{Box{{0, 0}, {2, 6}}, 0}})), std::nullopt);  // a hole
  EXPECT_EQ(table_sharding(table(
                {{Box{{0, 0}, {2, 6}}, 0}, {Box{{2, 0}, {2, 3}}, 1}, {Box{{2, 3}, {2, 3}}, 2}})),
            std::nullopt);  // boxes, but no grid
  EXPECT_EQ(table_sharding(table({{FlatRange{0, 8}, 0}, {FlatRange{8, 24}, 1}})), std::nullopt);
  formats::TensorEntry no_table = table({{whole, 0}, {whole, 1}});
  no_table.meta.fqn = "model.fc.weight";
  EXPECT_EQ(table_sharding(no_table), std::nullopt);
}

}  // namespace
}  // namespace tessera::inspect
