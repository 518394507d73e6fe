#include "tessera/inspect/tensor_reader.h"

#include <gmock/gmock.h>

#include <numeric>
#include <random>

#include "support/memory_checkpoint.h"

namespace tessera::inspect {
namespace {

using test::MemoryCheckpoint;

std::vector<std::int32_t> iota(std::int64_t numel) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(numel));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

std::vector<std::byte> read_all(const TensorReader& tensor, std::int64_t step) {
  std::vector<std::byte> bytes;
  const std::uint64_t size = itemsize(tensor.meta().dtype);
  for (std::int64_t begin = 0; begin < tensor.meta().numel(); begin += step) {
    const std::int64_t end = std::min(tensor.meta().numel(), begin + step);
    std::vector<std::byte> window(static_cast<std::size_t>(end - begin) * size);
    tensor.read({begin, end}, window);
    bytes.insert(bytes.end(), window.begin(), window.end());
  }
  return bytes;
}

struct Layout {
  const char* name;
  Shape shape;
  std::vector<formats::Piece> pieces;
};

std::vector<Layout> layouts() {
  return {
      {"whole", {4, 6}, {{Box{{0, 0}, {4, 6}}, 0}}},
      {"rows", {4, 6}, {{Box{{0, 0}, {1, 6}}, 0}, {Box{{1, 0}, {3, 6}}, 1}}},
      {"columns in no order", {4, 6}, {{Box{{0, 4}, {4, 2}}, 0}, {Box{{0, 0}, {4, 4}}, 1}}},
      {"grid",
       {4, 6},
       {{Box{{0, 0}, {2, 3}}, 0},
        {Box{{0, 3}, {2, 3}}, 1},
        {Box{{2, 0}, {2, 3}}, 2},
        {Box{{2, 3}, {2, 3}}, 3}}},
      {"ranges", {4, 6}, {{FlatRange{0, 5}, 0}, {FlatRange{5, 5}, 1}, {FlatRange{5, 24}, 2}}},
      {"replicas of both kinds",
       {4, 6},
       {{Box{{0, 0}, {2, 6}}, 0},
        {FlatRange{0, 12}, 1},
        {FlatRange{12, 24}, 0},
        {Box{{2, 0}, {2, 6}}, 1}}},
      {"empty pieces beside one that is whole",
       {4, 6},
       {{Box{{0, 0}, {0, 6}}, 0}, {Box{{0, 0}, {4, 6}}, 1}, {FlatRange{7, 7}, 2}}},
      {"three dimensions",
       {2, 3, 4},
       {{Box{{0, 0, 0}, {2, 3, 1}}, 0},
        {Box{{0, 0, 1}, {1, 3, 3}}, 1},
        {Box{{1, 0, 1}, {1, 3, 3}}, 2}}},
      {"0-d", {}, {{Box{}, 0}}},
      {"no elements", {0, 5}, {{Box{{0, 0}, {0, 5}}, 0}}},
      {"no pieces and no elements", {3, 0}, {}},
  };
}

TEST(TensorReaderTest, ReadsTheSameElementsFromAnyPieces) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const auto whole = test::bytes_of(iota(numel_of(layout.shape)));
    MemoryCheckpoint checkpoint;
    checkpoint.add({"t", DType::int32, layout.shape}, whole, layout.pieces);
    const TensorReader tensor(checkpoint, 0);
    for (std::int64_t step : {1, 2, 3, 5, 7, 12, 24, 100}) {
      SCOPED_TRACE(step);
      EXPECT_EQ(read_all(tensor, step), whole);
    }
    for (std::uint64_t block_nbytes : {1U, 8U, 20U, 1000U}) {
      std::vector<std::byte> bytes;
      std::int64_t reached = 0;
      for_each_block(tensor, block_nbytes, [&](FlatRange window, std::span<const std::byte> block) {
        EXPECT_EQ(window.begin, reached);
        EXPECT_LE(block.size(), std::max<std::uint64_t>(block_nbytes, 4));
        reached = window.end;
        bytes.insert(bytes.end(), block.begin(), block.end());
      });
      EXPECT_EQ(bytes, whole);
    }
  }
}

std::vector<Box> boxes_within(const Shape& shape) {
  std::vector<Box> boxes = {{Shape(), Shape()}};
  for (const std::int64_t size : shape) {
    std::vector<Box> longer;
    for (const Box& box : boxes) {
      for (std::int64_t begin = 0; begin <= size; ++begin) {
        for (std::int64_t end = begin; end <= size; ++end) {
          longer.push_back(box);
          longer.back().offsets.push_back(begin);
          longer.back().sizes.push_back(end - begin);
        }
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

TEST(TensorReaderTest, ReadsAnyBoxInWindowsOfAnySize) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const auto whole = test::bytes_of(iota(numel_of(layout.shape)));
    MemoryCheckpoint checkpoint;
    checkpoint.add({"t", DType::int32, layout.shape}, whole, layout.pieces);
    const TensorReader tensor(checkpoint, 0);
    for (const Box& box : boxes_within(layout.shape)) {
      SCOPED_TRACE(region_to_string(box));
      const auto expected = test::gather_region(whole, layout.shape, box, 4);
      for (const std::int64_t step : {1, 5, 24}) {
        std::vector<std::byte> found(expected.size());
        for (std::int64_t begin = 0; begin < box.numel(); begin += step) {
          const std::int64_t end = std::min(box.numel(), begin + step);
          tensor.read(box, {begin, end},
                      std::span(found).subspan(static_cast<std::size_t>(begin) * 4,
                                               static_cast<std::size_t>(end - begin) * 4));
        }
        EXPECT_EQ(found, expected);
      }
    }
  }
}

TEST(TensorReaderTest, BlocksEndWhereDensePiecesEnd) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", DType::int32, {10}}, test::bytes_of(iota(10)),
                 {{FlatRange{0, 4}, 0}, {FlatRange{4, 10}, 1}});
  const TensorReader tensor(checkpoint, 0);
  std::vector<std::int64_t> ends;
  for_each_block(tensor, 12, [&](FlatRange window, auto) { ends.push_back(window.end); });
  EXPECT_THAT(ends, ::testing::ElementsAre(3, 4, 7, 10));
}

TEST(TensorReaderTest, RefusesTensorsWithHolesOrOverlaps) {
  MemoryCheckpoint checkpoint("step-7");
  checkpoint.add({"t", DType::int32, {4}}, test::bytes_of(iota(4)), {{FlatRange{0, 3}, 0}});
  try {
    const TensorReader tensor(checkpoint, 0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::corruption);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("step-7: t: coverage: expected"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("[3, 4)"));
  }
  MemoryCheckpoint overlapping;
  overlapping.add({"t", DType::int32, {4}}, test::bytes_of(iota(4)),
                  {{FlatRange{0, 3}, 0}, {FlatRange{2, 4}, 1}});
  EXPECT_THROW(TensorReader(overlapping, 0), Error);
}

TEST(TensorReaderTest, PassesOnWhatThePieceReadThrows) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", DType::int32, {4}}, test::bytes_of(iota(4)),
                 {{FlatRange{0, 2}, 0}, {FlatRange{2, 4}, 1}});
  checkpoint.fail_reads_of("t", 1);
  const TensorReader tensor(checkpoint, 0);
  std::vector<std::byte> bytes(8);
  EXPECT_NO_THROW(tensor.read({0, 2}, bytes));
  EXPECT_THROW(tensor.read({1, 3}, bytes), Error);
  EXPECT_NO_THROW(tensor.read(Box{{0}, {2}}, {0, 2}, bytes));
  EXPECT_THROW(tensor.read(Box{{1}, {2}}, {0, 2}, bytes), Error);
}

}  // namespace
}  // namespace tessera::inspect
