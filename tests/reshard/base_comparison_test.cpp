#include "tessera/reshard/base_comparison.h"

#include <gmock/gmock.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reshard/equal_pieces_text.h"
#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {
namespace {

using formats::PiecePair;
using test::Bytes;
using test::bytes_of;
using test::MemoryCheckpoint;
using test::ThrowsError;

/// A base checkpoint in memory.
class MemoryBase final : public formats::BaseCheckpoint {
 public:
  explicit MemoryBase(MemoryCheckpoint checkpoint, std::string identity = "x")
      : checkpoint_(std::move(checkpoint)), identity_(std::move(identity)) {}
  const formats::CheckpointReader& reader() const override { return checkpoint_; }
  std::string identity() const override { return identity_; }
  std::vector<PiecePair> worth_linking(std::vector<PiecePair> equal) const override {
    return equal;
  }

 private:
  MemoryCheckpoint checkpoint_;
  std::string identity_;
};

constexpr std::int64_t kNumelOfModel = 3 << 18;  // three blocks of 1 MiB

MemoryCheckpoint checkpoint_with(std::size_t changed_element) {
  MemoryCheckpoint checkpoint("memory", 2);
  std::vector<float> numbers(kNumelOfModel);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  checkpoint.add({"a", DType::float32, {kNumelOfModel}}, bytes_of(numbers));
  if (changed_element < numbers.size()) numbers[changed_element] = -1.0F;
  checkpoint.add({"b", DType::float32, {kNumelOfModel}}, bytes_of(numbers),
                 {{Box{{0}, {kNumelOfModel - 5}}, 0}, {Box{{kNumelOfModel - 5}, {5}}, 1}});
  checkpoint.add({"c", DType::int64, {2}}, bytes_of<std::int64_t>({1, 2}));
  return checkpoint;
}

std::vector<std::string> names_of(const std::vector<PiecePair>& pairs) {
  std::vector<std::string> names;
  for (const PiecePair& pair : pairs) {
    names.push_back(std::string(1, "abc"[pair.piece.tensor_index]) +
                    std::to_string(pair.piece.piece_index));
  }
  return names;
}

std::vector<std::string> equal_names(const MemoryCheckpoint& source, const MemoryBase& base,
                                     std::optional<int> rank = {}) {
  const Plan plan = plan_reshard(source.contents(), "memory", {});
  const auto matches =
      find_equal_pieces(plan, source, base, RowChanges::write_piece, {.num_threads = 2}, rank);
  EXPECT_THAT(matches.changed_rows, testing::IsEmpty());
  return names_of(matches.pairs);
}

TEST(BaseComparisonTest, OneChangedElementAnywhereMakesItsPieceDiffer) {
  const MemoryBase base(checkpoint_with(kNumelOfModel));
  EXPECT_THAT(equal_names(checkpoint_with(kNumelOfModel), base),
              testing::ElementsAre("a0", "b0", "b1", "c0"));
  for (const std::size_t changed :
       {std::size_t{0}, std::size_t{kNumelOfModel} / 2, std::size_t{kNumelOfModel} - 6}) {
    EXPECT_THAT(equal_names(checkpoint_with(changed), base),
                testing::ElementsAre("a0", "b1", "c0"));
  }
  EXPECT_THAT(equal_names(checkpoint_with(kNumelOfModel - 1), base),
              testing::ElementsAre("a0", "b0", "c0"));
}

TEST(BaseComparisonTest, ARankComparesItsOwnPieces) {
  const MemoryBase base(checkpoint_with(kNumelOfModel));
  EXPECT_THAT(equal_names(checkpoint_with(0), base, 1), testing::ElementsAre("b1"));
}

TEST(BaseComparisonTest, OtherDtypesShapesKindsAndRegionsAreNotCompared) {
  MemoryCheckpoint other("memory", 2);
  other.add({"a", DType::int32, {kNumelOfModel}},
            bytes_of(std::vector<std::int32_t>(kNumelOfModel)));
  other.add(
      {"b", DType::float32, {kNumelOfModel}}, bytes_of(std::vector<float>(kNumelOfModel)),
      {{FlatRange{0, kNumelOfModel - 5}, 0}, {FlatRange{kNumelOfModel - 5, kNumelOfModel}, 1}});
  other.add({"c", DType::int64, {2}}, bytes_of<std::int64_t>({1, 2})).kind =
      formats::StateKind::opaque;
  EXPECT_THAT(equal_names(checkpoint_with(kNumelOfModel), MemoryBase(std::move(other))),
              testing::IsEmpty());
}

TEST(BaseComparisonTest, ADamagedBaseIsAnError) {
  MemoryCheckpoint damaged = checkpoint_with(kNumelOfModel);
  damaged.fail_reads_of("c", 0);
  const MemoryBase base(std::move(damaged));
  EXPECT_THAT([&] { equal_names(checkpoint_with(kNumelOfModel), base); },
              ThrowsError(ErrorKind::corruption, "c"));
}

TEST(BaseComparisonTest, RanksTellEachOtherTheirEqualPieces) {
  const MemoryBase base(checkpoint_with(kNumelOfModel));
  const MemoryCheckpoint source = checkpoint_with(0);
  const Plan plan = plan_reshard(source.contents(), "memory", {});
  const auto pairs = formats::pair_pieces(plan.destination, base.reader().contents());
  std::vector<std::string> texts;
  for (const int rank : {0, 1}) {
    texts.push_back(equal_pieces_to_text(
        base, pairs,
        find_equal_pieces(plan, source, base, RowChanges::write_piece, {.num_threads = 1}, rank),
        RowsInText::leave_out));
  }
  EXPECT_EQ(texts[0], "x 0-1 3-4");
  EXPECT_EQ(texts[1], "x 2-3");
  EXPECT_THAT(names_of(equal_pieces_from_texts(base, plan.destination, pairs, texts, "path").pairs),
              testing::ElementsAre("a0", "b1", "c0"));
  const MemoryBase another(checkpoint_with(kNumelOfModel), "y");
  EXPECT_THAT([&] { equal_pieces_from_texts(another, plan.destination, pairs, texts, "path"); },
              ThrowsError(ErrorKind::mismatch, "on rank 0"));
}

/// A checkpoint of one table. Of the rows in `changed`, one element is not that of the base.
MemoryCheckpoint table_with(std::int64_t num_rows, std::int64_t num_columns,
                            const std::vector<std::int64_t>& changed) {
  MemoryCheckpoint checkpoint("memory");
  std::vector<float> numbers(static_cast<std::size_t>(num_rows * num_columns), 1.0F);
  for (const std::int64_t row : changed) {
    numbers[static_cast<std::size_t>(row * num_columns + row % num_columns)] = 2.0F;
  }
  checkpoint.add({"table", DType::float32, {num_rows, num_columns}}, bytes_of(numbers));
  return checkpoint;
}

formats::PieceMatches compare_rows(const MemoryCheckpoint& source, const MemoryBase& base) {
  const Plan plan = plan_reshard(source.contents(), "memory", {});
  return find_equal_pieces(plan, source, base, RowChanges::write_rows, {.num_threads = 2});
}

std::vector<std::int64_t> rows_in(const formats::RowSet& rows) {
  std::vector<std::int64_t> all;
  rows.for_each(0, rows.num_rows(), [&](std::int64_t row) { all.push_back(row); });
  return all;
}

TEST(BaseComparisonTest, ChangedRowsAreFoundInAllBlocks) {
  // Blocks of 1 MiB have 43690 rows of 24 bytes.
  const MemoryBase base(table_with(100'000, 6, {}));
  const std::vector<std::int64_t> changed = {0, 63, 64, 65, 43'689, 43'690, 99'999};
  const formats::PieceMatches matches = compare_rows(table_with(100'000, 6, changed), base);
  ASSERT_THAT(matches.pairs, testing::SizeIs(1));
  ASSERT_THAT(matches.changed_rows, testing::SizeIs(1));
  EXPECT_EQ(rows_in(matches.changed_rows.begin()->second), changed);
}

TEST(BaseComparisonTest, APatchHasAtMostAQuarterOfThePiece) {
  const MemoryBase base(table_with(4'000, 6, {}));
  std::vector<std::int64_t> changed;
  // A patch has 32 bytes a row (24, and 8 for its number): 750 rows are a quarter of 4000 * 24.
  for (std::int64_t row = 0; row < 750; ++row) changed.push_back(row);
  EXPECT_THAT(compare_rows(table_with(4'000, 6, changed), base).changed_rows, testing::SizeIs(1));
  changed.push_back(3'999);
  EXPECT_THAT(compare_rows(table_with(4'000, 6, changed), base).pairs, testing::IsEmpty());
}

TEST(BaseComparisonTest, SmallPiecesPartsOfRowsAndLongRowsAreWrittenWhole) {
  const MemoryBase small(table_with(2'000, 6, {}));  // 48,000 bytes
  EXPECT_THAT(compare_rows(table_with(2'000, 6, {7}), small).pairs, testing::IsEmpty());
  const MemoryBase long_rows(table_with(8, 300'000, {}));
  EXPECT_THAT(compare_rows(table_with(8, 300'000, {7}), long_rows).pairs, testing::IsEmpty());
  const auto with_columns_cut = [](const std::vector<std::int64_t>& changed) {
    MemoryCheckpoint checkpoint = table_with(20'000, 6, changed);
    Bytes whole = checkpoint.piece_bytes("table", 0);
    MemoryCheckpoint cut("memory");
    cut.add({"table", DType::float32, {20'000, 6}}, whole,
            {{Box{{0, 0}, {20'000, 3}}, 0}, {Box{{0, 3}, {20'000, 3}}, 0}});
    return cut;
  };
  const MemoryBase cut(with_columns_cut({}));
  EXPECT_THAT(names_of(compare_rows(with_columns_cut({0}), cut).pairs), testing::ElementsAre("a1"));
}

TEST(BaseComparisonTest, WorkersTellEachOtherTheChangedRows) {
  const MemoryBase base(table_with(100'000, 6, {}));
  const MemoryCheckpoint source = table_with(100'000, 6, {0, 1, 2, 64, 99'998, 99'999});
  const auto& contents = source.contents();
  const auto pairs = formats::pair_pieces(contents, base.reader().contents());
  const formats::PieceMatches matches = compare_rows(source, base);
  const std::string text = equal_pieces_to_text(base, pairs, matches, RowsInText::say);
  EXPECT_EQ(text, "x 0:0+3,61+1,99933+2");
  const auto read = [&](const std::string& text_given) {
    return equal_pieces_from_texts(base, contents, pairs, std::vector{text_given}, "path");
  };
  EXPECT_EQ(read(text).changed_rows, matches.changed_rows);
  EXPECT_EQ(equal_pieces_to_text(base, pairs, matches, RowsInText::leave_out), "x 0:");
  EXPECT_EQ(read("x 0:").changed_rows.begin()->second.count(), 0);
  for (const std::string wrong : {"x 1:0+1", "x 0:99999+2", "x 0:0+3,", "x 0:5", "x 0", "x 0-2",
                                  "x 0:0+1;", "x  0:", "x a"}) {
    EXPECT_THAT([&] { read(wrong); }, ThrowsError(ErrorKind::mismatch, "path")) << wrong;
  }
}

}  // namespace
}  // namespace tessera::reshard
