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
              ElementsAre(ByteRange{10, 3000}, ByteRange{100'000, 100'001}));
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

TEST(ReadListTest, SmallReadsInAnotherOrderThanTheFileShareRequests) {
  constexpr std::uint64_t kNumTensors = 1000;
  constexpr std::uint64_t kTensorNbytes = 16 << 10;
  std::vector<ByteRange> tensors;
  for (std::uint64_t i = 0; i < kNumTensors; ++i) {
    const std::uint64_t begin = (i * 377 % kNumTensors) * kTensorNbytes;
    tensors.push_back({begin, begin + kTensorNbytes});
  }
  ReadList list(tensors);
  ByteSet requested;
  std::size_t num_requests = 0;
  const auto request = [&](ByteRange range) {
    EXPECT_THAT(requested.missing(range), ElementsAre(range));
    requested.add(range);
    list.note_requested(range);
    ++num_requests;
  };
  for (const ByteRange tensor : tensors) {
    if (!requested.missing(tensor).empty()) request(tensor);
    for (const ByteRange part : list.next_after(tensor, {})) request(part);
  }
  EXPECT_THAT(requested.missing({0, kNumTensors * kTensorNbytes}), IsEmpty());
  EXPECT_LE(num_requests, 64U);
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
