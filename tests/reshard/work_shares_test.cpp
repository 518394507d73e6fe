#include "reshard/work_shares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/random.h"

namespace tessera::reshard {
namespace {

using Unit = formats::ShareWriter::Unit;

constexpr std::uint64_t kBlockNbytes = 1000;

/// Returns random pieces in random files, some of them larger than a share, some of a few bytes.
std::vector<PieceExtent> random_pieces(test::Random& random) {
  std::vector<PieceExtent> pieces;
  std::size_t file = 0;
  const std::int64_t num_pieces = random.between(0, 60);
  for (std::int64_t i = 0; i < num_pieces; ++i) {
    const std::int64_t most_blocks = random.between(0, 4) == 0 ? 200 : 3;
    const auto nbytes =
        static_cast<std::uint64_t>(random.between(1, most_blocks * std::int64_t{kBlockNbytes}));
    if (random.between(0, 5) == 0) ++file;
    pieces.push_back({.num_blocks = static_cast<std::int64_t>((nbytes - 1) / kBlockNbytes + 1),
                      .block_nbytes = kBlockNbytes,
                      .nbytes = nbytes,
                      .file = file});
  }
  return pieces;
}

/// The bytes and the file of each block.
struct Block {
  std::uint64_t nbytes;
  std::size_t file;
};

std::vector<Block> blocks_of(const std::vector<PieceExtent>& pieces) {
  std::vector<Block> blocks;
  for (const PieceExtent& piece : pieces) {
    std::uint64_t left = piece.nbytes;
    for (std::int64_t i = 0; i < piece.num_blocks; ++i) {
      blocks.push_back({std::min(left, kBlockNbytes), piece.file});
      left -= blocks.back().nbytes;
    }
  }
  return blocks;
}

class WorkSharesTest : public ::testing::TestWithParam<Unit> {};
INSTANTIATE_TEST_SUITE_P(Units, WorkSharesTest, ::testing::Values(Unit::block, Unit::file));

TEST_P(WorkSharesTest, EveryBlockIsInOneShare) {
  test::Random random;
  for (int number : {1, 2, 3, 8, 100}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      const auto pieces = random_pieces(random);
      const auto blocks = blocks_of(pieces);
      const auto shares = divide_blocks(pieces, GetParam(), number);
      ASSERT_EQ(shares.size(), static_cast<std::size_t>(number));
      std::vector<int> times(blocks.size());
      for (const BlocksOfShare& share : shares) {
        std::uint64_t nbytes = 0;
        std::int64_t end = -1;
        for (const BlockRange& range : share.ranges) {
          EXPECT_GT(range.begin, end);  // ascending, with a gap between ranges
          end = range.end;
          for (std::int64_t block = range.begin; block < range.end; ++block) {
            ++times[static_cast<std::size_t>(block)];
            nbytes += blocks[static_cast<std::size_t>(block)].nbytes;
          }
        }
        EXPECT_EQ(share.nbytes, nbytes);
      }
      EXPECT_THAT(times, ::testing::Each(1));
    }
  }
}

TEST(WorkSharesBalanceTest, SharesOfBlocksDifferByABlockAndFourPercent) {
  test::Random random;
  for (int number : {1, 2, 3, 8, 100}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      const auto pieces = random_pieces(random);
      double total = 0;
      for (const Block& block : blocks_of(pieces)) total += static_cast<double>(block.nbytes);
      const double mean = total / number;
      for (const BlocksOfShare& share : divide_blocks(pieces, Unit::block, number)) {
        EXPECT_LE(share.ranges.size(), 1U);
        EXPECT_NEAR(static_cast<double>(share.nbytes), mean, 0.04 * mean + kBlockNbytes + 1);
      }
    }
  }
}

TEST(WorkSharesBalanceTest, AShareEndsWithAFileWhereOneEndsNearby) {
  const PieceExtent first{.num_blocks = 101, .block_nbytes = 1000, .nbytes = 101'000, .file = 0};
  const PieceExtent second{.num_blocks = 99, .block_nbytes = 1000, .nbytes = 99'000, .file = 1};
  const auto shares = divide_blocks({first, second}, Unit::block, 2);
  EXPECT_EQ(shares[0], (BlocksOfShare{{{0, 101}}, 101'000}));
  EXPECT_EQ(shares[1], (BlocksOfShare{{{101, 200}}, 99'000}));
}

TEST(WorkSharesBalanceTest, AShareSaysWhetherItDividesAFile) {
  const PieceExtent first{.num_blocks = 100, .block_nbytes = 1000, .nbytes = 100'000, .file = 0};
  const PieceExtent second{.num_blocks = 200, .block_nbytes = 1000, .nbytes = 200'000, .file = 1};
  const auto divides = [&](int num_shares) {
    std::vector<bool> found;
    for (const auto& share : divide_blocks({first, second}, Unit::block, num_shares)) {
      found.push_back(share.divides_file);
    }
    return found;
  };
  EXPECT_EQ(divides(1), std::vector<bool>({false}));
  EXPECT_EQ(divides(2), std::vector<bool>({true, true}));
  EXPECT_EQ(divides(3), std::vector<bool>({false, true, true}));
  for (const auto& share : divide_blocks({first, second}, Unit::file, 2)) {
    EXPECT_FALSE(share.divides_file);
  }
}

TEST(WorkSharesBalanceTest, WholeFilesGoToTheShareWithTheFewestBytes) {
  std::vector<PieceExtent> pieces;
  for (const std::uint64_t nbytes : {1000U, 5000U, 3000U, 2000U, 4000U}) {
    pieces.push_back({.num_blocks = static_cast<std::int64_t>(nbytes / kBlockNbytes),
                      .block_nbytes = kBlockNbytes,
                      .nbytes = nbytes,
                      .file = pieces.size()});
  }
  const auto shares = divide_blocks(pieces, Unit::file, 2);
  EXPECT_EQ(shares[0], (BlocksOfShare{{{0, 6}, {9, 11}}, 8000}));
  EXPECT_EQ(shares[1], (BlocksOfShare{{{6, 9}, {11, 15}}, 7000}));
}

}  // namespace
}  // namespace tessera::reshard
