#include "embedding_kernels/touched_rows.h"

#include <gmock/gmock.h>

#include <map>

#include "embedding_kernels/batches.h"
#include "support/error_matchers.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

using tessera::test::ThrowsError;
using test::Batch;
using test::Random;
using test::Table;
using ::testing::IsEmpty;
using ::testing::SizeIs;

struct Place {
  std::int64_t sample;
  std::int64_t column;
  float weight;
  bool operator==(const Place&) const = default;
};
using PlacesOfRow = std::map<std::int64_t, std::vector<Place>>;

PlacesOfRow expected_places(const Batch& batch, int table) {
  PlacesOfRow places;
  batch.for_places([&](std::size_t feature, std::int64_t sample, std::size_t place) {
    if (batch.table_of_feature[feature] != table) return;
    places[batch.ids[place]].push_back(
        {sample, batch.column_of_feature[feature], batch.weight(place)});
  });
  return places;
}

void expect_places(const TouchedRows::OfTable& found, const PlacesOfRow& expected) {
  ASSERT_THAT(found.rows, SizeIs(expected.size()));
  ASSERT_THAT(found.offsets, SizeIs(expected.size() + 1));
  std::int64_t index = 0;
  for (const auto& [row, places] : expected) {
    ASSERT_EQ(found.rows[static_cast<std::size_t>(index)], row);
    ASSERT_EQ(found.end_of(index) - found.begin_of(index),
              static_cast<std::int64_t>(places.size()));
    for (std::size_t i = 0; i < places.size(); ++i) {
      const auto& [sample, column, weight] =
          found.occurrences[static_cast<std::size_t>(found.begin_of(index)) + i];
      ASSERT_EQ((Place{sample, column, weight}), places[i]);
    }
    ++index;
  }
}

/// Of these numbers of rows, sorting needs no pass, one, two and three.
std::vector<Table> tables_without_weights() {
  std::vector<Table> tables;
  for (const std::int64_t rows : {1, 2, 2048, 2049, 100'000, 1 << 22, (1 << 22) + 1}) {
    tables.push_back({.dtype = DType::float32, .rows = rows, .dim = 1, .bytes = {}});
  }
  return tables;
}

// Shows D9.
TEST(TouchedRowsTest, RowsAreSortedAndTheirPlacesInBatchOrder) {
  Random random;
  std::vector<Table> tables = tables_without_weights();
  TouchedRows touched;
  for (const std::int64_t batch_size : {2, 700, 40}) {  // memory is used again
    const Batch batch = test::random_batch(random, tables,
                                           {.table_of_feature = {6, 0, 1, 2, 3, 4, 5, 2, 6},
                                            .batch = batch_size,
                                            .weights = test::BatchShape::Weights::random});
    for (const int num_threads : {1, 3}) {
      touched.assign(test::views_of(tables), batch.bags(), num_threads);
      for (int table = 0; table < static_cast<int>(tables.size()); ++table) {
        SCOPED_TRACE(table);
        expect_places(touched[table], expected_places(batch, table));
      }
    }
  }
}

// Shows D9.
TEST(TouchedRowsTest, OccurrencesOfHotRowsAreCountedInBlocks) {
  std::vector<Table> tables = tables_without_weights();
  constexpr std::int64_t kBlock = TouchedRows::kBlockOccurrences;
  Batch batch;
  batch.table_of_feature = {4};
  batch.column_of_feature = {0};
  batch.batch = 1;
  const std::vector<std::pair<std::int64_t, std::int64_t>> rows{
      {5, 2 * kBlock}, {7, kBlock}, {8, kBlock + 1}, {90'000, 1}};
  for (const auto& [row, numel] : rows) {
    batch.ids.insert(batch.ids.end(), static_cast<std::size_t>(numel), row);
  }
  batch.offsets = {0, static_cast<std::int64_t>(batch.ids.size())};

  const TouchedRows touched = touched_rows(test::views_of(tables), batch.bags(), 1);
  const TouchedRows::OfTable found = touched[4];
  ASSERT_THAT(found.hot_rows, SizeIs(2));
  EXPECT_EQ(found.hot_rows[0].index, 0);
  EXPECT_EQ(found.hot_rows[1].index, 2);
  EXPECT_EQ(found.first_block_of(0), 0);
  EXPECT_EQ(found.first_block_of(2), 2);
  EXPECT_EQ(found.num_blocks, 4);
}

// Shows D7.
TEST(TouchedRowsTest, NoIdsTouchNoRows) {
  std::vector<Table> tables{{.dtype = DType::float32, .rows = 0, .dim = 4, .bytes = {}}};
  const TouchedRows none = touched_rows(test::views_of(tables), Batch{}.bags(), 2);
  EXPECT_THAT(none[0].rows, IsEmpty());

  Batch empty_bags;
  empty_bags.table_of_feature = {0};
  empty_bags.column_of_feature = {0};
  empty_bags.batch = 2;
  empty_bags.offsets = {0, 0, 0};
  const TouchedRows empty = touched_rows(test::views_of(tables), empty_bags.bags(), 2);
  EXPECT_THAT(empty[0].rows, IsEmpty());
  EXPECT_THAT(empty[0].occurrences, IsEmpty());
}

// Shows D9.
TEST(TouchedRowsTest, MoreSamplesThanAnOccurrenceHoldsAreRefused) {
  Bags bags{};
  bags.batch = std::int64_t{1} << 32;
  EXPECT_THAT([&] { touched_rows({}, bags, 1); },
              ThrowsError(ErrorKind::unsupported,
                          "samples of a batch: expected at most 4294967295, found 4294967296"));
}

// Shows D9.
TEST(TouchedRowsTest, MoreRowsThanAnEntryHoldsAreRefused) {
  std::vector<Table> tables{
      {.dtype = DType::float32, .rows = std::int64_t{1} << 32, .dim = 1, .bytes = {}}};
  EXPECT_THAT([&] { touched_rows(test::views_of(tables), Batch{}.bags(), 1); },
              ThrowsError(ErrorKind::unsupported,
                          "rows of a table: expected at most 4294967295, found 4294967296"));
}

}  // namespace
}  // namespace tessera::embedding
