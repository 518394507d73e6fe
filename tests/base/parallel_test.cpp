#include "tessera/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/error_matchers.h"

namespace tessera {
namespace {

TEST(ParallelTest, EveryTaskRunsOnce) {
  for (const int num_threads : {0, 1, 2, 7, 64}) {
    for (const std::int64_t num_tasks : {0, 1, 5, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(num_tasks));
      parallel_for(num_tasks, num_threads, {},
                   [&](std::int64_t i) { ++runs[static_cast<std::size_t>(i)]; });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

// So many tasks that they would never end: if a test ends, its tasks were stopped.
constexpr std::int64_t kEndless = std::int64_t{1} << 60;

TEST(ParallelTest, TheFirstExceptionStopsTheRestAndReachesTheCaller) {
  for (const int num_threads : {1, 4}) {
    EXPECT_THROW(parallel_for(kEndless, num_threads, {},
                              [&](std::int64_t i) {
                                if (i == 10) throw std::runtime_error("ten");
                              }),
                 std::runtime_error);
  }
}

TEST(ParallelTest, AStopRequestBecomesInterrupted) {
  std::stop_source stop;
  std::atomic<int> num_started = 0;
  EXPECT_THAT(
      [&] {
        parallel_for(kEndless, 3, stop.get_token(), [&](std::int64_t) {
          if (++num_started == 5) stop.request_stop();
        });
      },
      test::ThrowsError(ErrorKind::interrupted, "interrupted"));
}

/// Counts down when the thread that holds it ends.
struct AtThreadEnd {
  std::latch* latch = nullptr;
  ~AtThreadEnd() {
    if (latch != nullptr) latch->count_down();
  }
};

TEST(ParallelTest, AFailureIsToldAlsoWhereItInterruptsOthersFirst) {
  const std::thread::id caller = std::this_thread::get_id();
  EXPECT_THAT(
      [&] {
        std::latch both_work(2);
        std::latch helper_has_ended(1);  // by then, its failure is recorded
        parallel_for(2, 2, {}, [&](std::int64_t) {
          both_work.arrive_and_wait();
          if (std::this_thread::get_id() != caller) {
            static thread_local AtThreadEnd at_end;
            at_end.latch = &helper_has_ended;
            throw Error(ErrorKind::interrupted, {}, "interrupted");
          }
          helper_has_ended.wait();
          throw Error(ErrorKind::io, {}, "the disk is full");
        });
      },
      test::ThrowsError(ErrorKind::io, "the disk is full"));
}

TEST(ParallelTest, OfTwoFailuresTheCallerSeesThatOfTheEarlierTask) {
  for (const std::int64_t first_to_fail : {0, 1}) {
    EXPECT_THAT(
        [&] {
          std::latch both_work(2);
          std::latch one_has_failed(1);
          parallel_for(2, 2, {}, [&](std::int64_t i) {
            both_work.arrive_and_wait();
            if (i == first_to_fail) {
              one_has_failed.count_down();
            } else {
              one_has_failed.wait();
              std::this_thread::sleep_for(std::chrono::milliseconds(20));  // lets it be noted
            }
            throw Error(ErrorKind::io, {}, "task " + std::to_string(i));
          });
        },
        test::ThrowsError(ErrorKind::io, "task 0"));
  }
}

TEST(ParallelTest, AStopRequestAfterTheLastTaskChangesNothing) {
  std::stop_source stop;
  EXPECT_NO_THROW(parallel_for(1, 1, stop.get_token(), [&](std::int64_t) { stop.request_stop(); }));
}

TEST(ParallelTest, OneThreadRunsInOrderOnTheCaller) {
  std::vector<std::int64_t> order;
  parallel_for(5, 1, {}, [&](std::int64_t i) { order.push_back(i); });
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_GE(default_num_threads(), 1);
  EXPECT_LE(default_num_threads(), 16);
}

}  // namespace
}  // namespace tessera
