#include "object_store/upload_workers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tessera::object_store {
namespace {

constexpr std::uint64_t kMib = std::uint64_t{1} << 20;

/// Runs one task for each part size, and returns the largest number of tasks that ran together. A
/// task waits until `num_expected` tasks run together (at most 20 s), then 20 ms for one more.
int most_together(const std::vector<std::uint64_t>& part_nbytes, int num_expected) {
  std::mutex mutex;
  std::condition_variable changed;
  int num_running = 0;
  int most = 0;
  UploadWorkers workers(part_nbytes.size());
  for (const std::uint64_t nbytes : part_nbytes) {
    workers.run(nbytes, [&] {
      std::unique_lock lock(mutex);
      most = std::max(most, ++num_running);
      changed.notify_all();
      changed.wait_for(lock, std::chrono::seconds(20), [&] { return most >= num_expected; });
      // Wait for one task too many: it must not start, but a bug might let it start.
      changed.wait_for(lock, std::chrono::milliseconds(20), [&] { return most > num_expected; });
      --num_running;
    });
  }
  workers.wait();
  return most;
}

TEST(UploadWorkersTest, EightSmallPartsAreUploadedTogether) {
  EXPECT_EQ(most_together(std::vector<std::uint64_t>(20, 8 * kMib), 8), 8);
}

TEST(UploadWorkersTest, PartsTogetherAreAtMostSixtyFourMebibytes) {
  EXPECT_EQ(most_together(std::vector<std::uint64_t>(12, 12 * kMib), 5), 5);
}

TEST(UploadWorkersTest, FourPartsOfAnySizeAreUploadedTogether) {
  EXPECT_EQ(most_together(std::vector<std::uint64_t>(10, 500 * kMib), 4), 4);
}

TEST(UploadWorkersTest, LimitsForOnePartSizeAreThoseOfTheWorkers) {
  EXPECT_EQ(UploadLimits::num_uploads(0), 8);
  EXPECT_EQ(UploadLimits::num_uploads(8 * kMib), 8);
  EXPECT_EQ(UploadLimits::num_uploads(12 * kMib), 5);
  EXPECT_EQ(UploadLimits::num_uploads(500 * kMib), 4);
}

}  // namespace
}  // namespace tessera::object_store
