#include "object_store/announced_reads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace tessera::object_store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kMiBAnnounced = std::uint64_t{1} << 20;

ByteRange mib(std::uint64_t begin, std::uint64_t end) {
  return {begin * kMiBAnnounced, end * kMiBAnnounced};
}

TEST(ByteSetTest, MissingPartsAreThoseThatWereNotAdded) {
  ByteSet set;
  EXPECT_THAT(set.missing({3, 9}), ElementsAre(ByteRange{3, 9}));
  set.add({4, 6});
  set.add({8, 8});
  set.add({10, 12});
  EXPECT_THAT(set.missing({3, 11}), ElementsAre(ByteRange{3, 4}, ByteRange{6, 10}));
  EXPECT_THAT(set.missing({5, 7}), ElementsAre(ByteRange{6, 7}));
  set.add({6, 10});
  EXPECT_THAT(set.missing({0, 20}), ElementsAre(ByteRange{0, 4}, ByteRange{12, 20}));
  set.add({2, 15});
  EXPECT_THAT(set.missing({2, 15}), IsEmpty());
  set.add({20, 30});
  set.remove({5, 7});
  set.remove({12, 22});
  set.remove({29, 40});
  EXPECT_THAT(set.missing({0, 40}),
              ElementsAre(ByteRange{0, 2}, ByteRange{5, 7}, ByteRange{12, 22}, ByteRange{29, 40}));
}

TEST(ReadListTest, ReadsAheadInTheOrderOfTheReadsAndNoFurther) {
  ReadList list({mib(40, 44), mib(0, 4), mib(20, 30)});
  list.note_requested(mib(40, 42));
  EXPECT_THAT(list.next_after(mib(40, 42), {}),
              ElementsAre(mib(42, 44), mib(0, 4), mib(20, 28), mib(28, 30)));
  EXPECT_THAT(list.next_after(mib(20, 24), {}), ElementsAre(mib(24, 30)));
  EXPECT_THAT(list.next_after(mib(30, 31), {}), IsEmpty());
  EXPECT_THAT(list.next_after(mib(50, 51), {}), IsEmpty());
}

TEST(ReadListTest, NothingIsRequestedTwice) {
  // Several threads read the same ranges from different places, and each reads ahead.
  const ReadAheadSizes sizes;
  std::vector<ByteRange> tensors;
  for (std::uint64_t i = 0; i < 8; ++i) tensors.push_back(mib(32 * i, 32 * i + 32));
  ReadList list(tensors);
  std::uint64_t requested = 0;
  ByteSet seen;
  const auto request = [&](ByteRange range) {
    for (const ByteRange part : seen.missing(range)) requested += part.nbytes();
    seen.add(range);
  };
  std::uint64_t ahead_nbytes = 0;
  for (std::uint64_t at = 0; at < 32; at += 4) {
    for (std::uint64_t tensor = 0; tensor < 8; ++tensor) {
      const ByteRange read = mib(32 * tensor + at, 32 * tensor + at + 4);
      list.note_requested(read);
      request(read);
      for (const ByteRange part : list.next_after(read, sizes)) {
        EXPECT_THAT(seen.missing(part), ElementsAre(part));
        list.note_requested(part);
        request(part);
        ahead_nbytes += part.nbytes();
      }
    }
  }
  EXPECT_EQ(requested, 256 * kMiBAnnounced);
  EXPECT_GT(ahead_nbytes, 200 * kMiBAnnounced);
}

TEST(ReadListTest, SmallGapsAreReadAndBytesThatAreReadTwiceAreListedOnce) {
  const ReadList list({{0, 1000}, {2000, 3000}, {0, 500}, {100'000, 100'001}});
  EXPECT_THAT(list.next_after({0, 10}, {}),
              ElementsAre(ByteRange{0, 3000}, ByteRange{100'000, 100'001}));
}

TEST(ReadListTest, ManyReadsNeedWholeWindows) {
  ReadList list({mib(0, 1000)});
  std::size_t num_windows = 0;
  for (std::uint64_t at = 0; at < 400; ++at) {
    list.note_requested(mib(at, at + 1));
    for (const ByteRange part : list.next_after(mib(at, at + 1), {})) {
      ++num_windows;
      list.note_requested(part);
    }
  }
  EXPECT_LE(num_windows, (400U + 64 + 8) / 8 + 1);
}

TEST(ReadListTest, SmallReadsInAnotherOrderThanTheFileShareRequestsOfWholeCells) {
  constexpr std::uint64_t kNumTensors = 1000;  // in 8 cells of 2 MiB
  constexpr std::uint64_t kTensorNbytes = 16 << 10;
  std::vector<ByteRange> tensors;
  for (std::uint64_t i = 0; i < kNumTensors; ++i) {
    const std::uint64_t begin = (i * 377 % kNumTensors) * kTensorNbytes;
    tensors.push_back({begin, begin + kTensorNbytes});
  }
  ReadList list(tensors);
  ByteSet requested;
  std::size_t num_requests = 0;
  for (const ByteRange tensor : tensors) {
    for (const ByteRange part : list.next_after(tensor, {})) {
      EXPECT_THAT(requested.missing(part), ElementsAre(part));
      requested.add(part);
      list.note_requested(part);
      ++num_requests;
    }
    EXPECT_THAT(requested.missing(tensor), IsEmpty());
  }
  EXPECT_EQ(num_requests, 8U);
}

TEST(ReadListTest, CellsEndAtLargeGapsAndHaveAllOfARunThatCrossesTheirBorder) {
  constexpr std::uint64_t kKiB = 1 << 10;
  constexpr std::uint64_t kCell = 2048 * kKiB;
  const ByteRange far{0, kKiB};
  const ByteRange near{100 * kKiB, 101 * kKiB};
  const ByteRange first{110 * kKiB, 111 * kKiB};
  const ByteRange crossing{kCell - kKiB, kCell + kKiB};
  const ByteRange behind{kCell + 2 * kKiB, kCell + 3 * kKiB};
  const ReadList list({first, behind, crossing, near, far});
  EXPECT_THAT(list.next_after(first, {}),
              ElementsAre(ByteRange{near.begin, first.end}, ByteRange{kCell, behind.end},
                          ByteRange{crossing.begin, kCell}, far));
  const ReadList from_border({crossing, near, behind});
  EXPECT_THAT(from_border.next_after(crossing, {}),
              ElementsAre(ByteRange{crossing.begin, behind.end}, near));
}

TEST(ReadListTest, DroppedBytesOfLargeRunsAreReadAheadAgainIfTheJobReadsThemAgain) {
  const auto drop_some = [](ReadList& list) {
    list.note_requested(mib(0, 40));
    list.note_requested(mib(50, 51));
    list.note_dropped(mib(8, 16));
    list.note_dropped(mib(50, 51));
    return list.next_after(mib(0, 1), {});
  };
  ReadList read_twice({mib(0, 40), mib(50, 51), mib(0, 40), mib(50, 51)});
  EXPECT_THAT(drop_some(read_twice), ElementsAre(mib(8, 16)));
  ReadList read_once({mib(0, 40), mib(50, 51), mib(39, 40)});
  EXPECT_THAT(drop_some(read_once), IsEmpty());
}

TEST(AnnouncedReadsTest, EndWithTheirObject) {
  EXPECT_EQ(AnnouncedReads::of("s3://bucket/a"), nullptr);
  {
    const AnnouncedReads reads({{"s3://bucket/a", {{0, 10}}}});
    EXPECT_NE(AnnouncedReads::of("s3://bucket/a"), nullptr);
    EXPECT_EQ(AnnouncedReads::of("s3://bucket/b"), nullptr);
  }
  EXPECT_EQ(AnnouncedReads::of("s3://bucket/a"), nullptr);
}

}  // namespace
}  // namespace tessera::object_store
