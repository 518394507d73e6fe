#include "object_store/read_ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::object_store {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

TEST(ReadAheadTest, PartsCoverTheRange) {
  EXPECT_TRUE(in_parts({5, 5}, 10).empty());
  EXPECT_THAT(in_parts({5, 26}, 10),
              ::testing::ElementsAre(ByteRange{5, 15}, ByteRange{15, 25}, ByteRange{25, 26}));
}

TEST(ReadAheadTest, AStreamIsReadAheadAsFarAsItHasCome) {
  StreamFinder streams({});
  const std::uint64_t file_nbytes = 1000 * kMiB;
  std::uint64_t ahead_end = 0;
  for (std::uint64_t begin = 0; begin < 400 * kMiB; begin += 4 * kMiB) {
    const auto ahead = streams.note({begin, begin + 4 * kMiB}, file_nbytes);
    if (!ahead || ahead->empty()) continue;
    EXPECT_GE(ahead->begin, ahead_end);
    ahead_end = ahead->end;
    EXPECT_LE(ahead_end, begin + 4 * kMiB + std::min(begin + 4 * kMiB, 64 * kMiB));
  }
  EXPECT_GE(ahead_end, 440 * kMiB);
}

TEST(ReadAheadTest, NothingIsReadBehindTheEnd) {
  StreamFinder streams({});
  for (std::uint64_t begin = 0; begin < 40 * kMiB; begin += 4 * kMiB) {
    const auto ahead = streams.note({begin, begin + 4 * kMiB}, 40 * kMiB);
    EXPECT_LE(ahead.value_or(ByteRange{}).end, 40 * kMiB);
  }
}

TEST(ReadAheadTest, ReadsThatDoNotFollowEachOtherAreNoStream) {
  StreamFinder streams({});
  for (std::uint64_t i = 100; i > 0; --i) {
    const std::uint64_t begin = i * 10 * kMiB;
    EXPECT_FALSE(streams.note({begin, begin + 4 * kMiB}, 2000 * kMiB)) << i;
  }
}

TEST(ReadAheadTest, AReadFarBackBeginsAStreamOfItsOwn) {
  StreamFinder streams({});
  const auto read_from = [&](std::uint64_t begin) {
    std::uint64_t nbytes_ahead = 0;
    for (std::uint64_t end = begin + 32 * kMiB; begin < end; begin += 4 * kMiB) {
      const auto ahead = streams.note({begin, begin + 4 * kMiB}, 2000 * kMiB);
      if (ahead) nbytes_ahead += ahead->nbytes();
    }
    return nbytes_ahead;
  };
  read_from(0);
  EXPECT_GT(read_from(500 * kMiB), 16 * kMiB);
  EXPECT_GT(read_from(200 * kMiB), 16 * kMiB);
}

TEST(ReadAheadTest, AHeaderIsNoStream) {
  StreamFinder streams({});
  EXPECT_FALSE(streams.note({0, 8}, 100 * kMiB));
  const auto ahead = streams.note({8, 200'000}, 100 * kMiB);
  EXPECT_TRUE(!ahead || ahead->empty());
}

}  // namespace
}  // namespace tessera::object_store
