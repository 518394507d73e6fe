// Wrong programs, and what the simulated device must find in them.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "runtime/support/checks.h"
#include "simulated_device/support.h"

namespace tessera {
namespace {

using sim::Schedule;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class DefectsTest : public test::OnEachSchedule {
 protected:
  c10::impl::VirtualGuardImpl guard_{sim::device(0).type()};
  c10::Stream main_ = guard_.getDefaultStream(sim::device(0));
  c10::Stream side_ = guard_.getNewStream(sim::device(0), 0);
};

TEST_P(DefectsTest, FindsAMissingWaitOfAReader) {
  for (const bool waits : {true, false}) {
    SCOPED_TRACE(waits ? "with a wait" : "without a wait");
    const at::Tensor written = torch::zeros({1000}, sim::device(0));
    written.add_(1);
    if (waits) test::make_wait(side_, main_);
    at::Tensor read;
    {
      const c10::StreamGuard on(side_);
      read = written * 3;
    }
    test::make_wait(main_, side_);
    const bool is_right = read.cpu().eq(3).all().item<bool>();
    if (waits) {
      EXPECT_TRUE(is_right);
      EXPECT_THAT(sim::take_races(), IsEmpty());
    } else {
      EXPECT_THAT(sim::take_races(),
                  Contains(HasSubstr("reads what aten::add.out on stream 0 wrote")));
    }
  }
}

TEST_P(DefectsTest, FindsAMissingWaitOfAWriter) {
  const at::Tensor shared = torch::ones({1000}, sim::device(0));
  test::make_wait(side_, main_);
  at::Tensor read;
  {
    const c10::StreamGuard on(side_);
    read = shared * 3;
  }
  shared.fill_(5);
  EXPECT_THAT(sim::take_races(), Contains(HasSubstr("aten::fill_.Scalar on stream 0 writes what")));
}

TEST_P(DefectsTest, AccessesToSeparateBytesAreNoRace) {
  const at::Tensor shared = torch::ones({1000}, sim::device(0));
  test::make_wait(side_, main_);
  shared.slice(0, 0, 500).fill_(2);
  {
    const c10::StreamGuard on(side_);
    shared.slice(0, 500, 1000).fill_(3);
  }
  EXPECT_THAT(sim::take_races(), IsEmpty());
  shared.slice(0, 499, 501).fill_(4);
  EXPECT_THAT(sim::take_races(), Not(IsEmpty()));
}

TEST_P(DefectsTest, FindsMemoryThatIsFreedTooEarly) {
  for (const bool is_recorded : {true, false}) {
    SCOPED_TRACE(is_recorded ? "with record_stream" : "without record_stream");
    at::Tensor used = torch::full({4096}, 5.0, sim::device(0));
    test::make_wait(side_, main_);
    at::Tensor copy;
    {
      const c10::StreamGuard on(side_);
      copy = used + 0;
    }
    if (is_recorded) used.record_stream(side_);
    used = at::Tensor();
    const at::Tensor taken = torch::full({4096}, 7.0, sim::device(0));
    if (is_recorded) {
      test::make_wait(main_, side_);
      EXPECT_TRUE(copy.cpu().eq(5).all().item<bool>());
      EXPECT_THAT(sim::take_races(), IsEmpty());
    } else {
      EXPECT_THAT(sim::take_races(), Contains(HasSubstr("reuse on stream 0 writes what")));
    }
  }
}

TEST_P(DefectsTest, FindsUseOfMemoryThatHasBeenFreed) {
  at::Tensor freed = torch::ones({64}, sim::device(0));
  const at::Tensor kept = at::from_blob(freed.data_ptr(), {64}, freed.options());
  freed = at::Tensor();
  kept.fill_(1);
  EXPECT_THAT(sim::take_races(), Contains(HasSubstr("uses memory that has been freed")));
}

TEST_P(DefectsTest, PinnedMemoryMayGoToTheDeviceAndBackWithoutTheHost) {
  const at::Tensor pinned = torch::ones({1000}).pin_memory();
  const at::Tensor there = pinned.to(sim::device(0), true);
  pinned.copy_(there * 2, true);
  const at::Tensor again = pinned.to(sim::device(0), true);
  EXPECT_TRUE(again.cpu().eq(2).all().item<bool>());
  EXPECT_THAT(sim::take_races(), IsEmpty());
}

TEST_P(DefectsTest, TheHostFaultsWhereItAccessesDeviceMemory) {
  const at::Tensor tensor = torch::ones({4}, sim::device(0));
  for (const bool writes : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGSEGV, SIG_DFL);
      auto* const values = static_cast<volatile float*>(tensor.data_ptr());
      if (writes) values[0] = 1;
      std::_Exit(values[0] == 1 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  }
}

TEST_P(DefectsTest, RefusesTensorsOfTwoDevicesAndOfTheHost) {
  const at::Tensor here = torch::ones({4}, sim::device(0));
  EXPECT_THAT(test::error_of([&] { here + torch::ones({4}, sim::device(1)); }),
              HasSubstr("sim:0 and sim:1"));
  EXPECT_THAT(test::error_of([&] { here + torch::ones({4}); }), HasSubstr("sim:0 and cpu"));
  EXPECT_THAT(test::error_of([&] {
                here.cumsum(0).logcumsumexp(0).scatter_add_(0, torch::zeros({4}, torch::kLong),
                                                            here);
              }),
              HasSubstr("got a tensor on cpu"));
}

TEST_P(DefectsTest, ACopyBetweenDevicesWaitsForBoth) {
  const at::Tensor source = torch::zeros({1000}, sim::device(0)).add_(3);
  const at::Tensor target = source.to(sim::device(1));
  source.fill_(9);
  EXPECT_TRUE((target + 1).cpu().eq(4).all().item<bool>());
  EXPECT_THAT(sim::take_races(), IsEmpty());
}

TEST_P(DefectsTest, AWaitOfTheHostOrdersWhatFollows) {
  const at::Tensor shared = torch::ones({1000}, sim::device(0));
  guard_.synchronizeStream(main_);
  {
    const c10::StreamGuard on(side_);
    shared.add_(1);
  }
  EXPECT_THAT(sim::take_races(), IsEmpty());
}

TEST_P(DefectsTest, AKernelThatThrowsIsReportedByTheNextWait) {
  const at::Tensor tensor = torch::ones({4}, sim::device(0));
  for (int i = 0; i < 100; ++i) {
    sim::launch(side_, "throws", {}, {}, [] { throw std::runtime_error("a kernel failed"); });
    // The other stream may still run this. One of the two waits must throw the failure, not both.
    tensor.add_(1);
    std::string reported;
    for (const c10::Stream& stream : {main_, side_}) {
      const std::string error = test::error_of([&] { guard_.synchronizeStream(stream); });
      if (error != "none") reported += error;
    }
    EXPECT_EQ(reported, "a kernel failed");
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, DefectsTest,
                         ::testing::Values(Schedule::lazy, Schedule::eager, Schedule::threads),
                         test::name_of_schedule);

TEST(PinnedMemoryTest, FindsAWriteToPinnedMemoryUnderACopy) {
  test::restart_under(Schedule::lazy);
  const at::Tensor pinned = torch::ones({1000}).pin_memory();
  ASSERT_TRUE(pinned.is_pinned());
  const at::Tensor there = pinned.to(sim::device(0), /*non_blocking=*/true);
  pinned.fill_(9);
  sim::synchronize();
  EXPECT_THAT(sim::take_races(), Contains(HasSubstr("writes to pinned memory")));
}

TEST(PinnedMemoryTest, ShowsNoOldValuesToAReaderOfPinnedMemoryUnderACopy) {
  test::restart_under(Schedule::lazy);
  const at::Tensor pinned = torch::ones({1000}).pin_memory();
  pinned.copy_(torch::full({1000}, 4.0, sim::device(0)), /*non_blocking=*/true);
  EXPECT_TRUE(pinned.isnan().all().item<bool>());
  sim::synchronize();
  EXPECT_TRUE(pinned.eq(4).all().item<bool>());
}

TEST(SchedulesTest, LazyWorkRunsWhenSomebodyWaits) {
  test::restart_under(Schedule::lazy);
  const at::Tensor tensor = torch::ones({4}, sim::device(0));
  c10::Event event(sim::device(0).type());
  event.record(c10::impl::VirtualGuardImpl(sim::device(0).type()).getStream(sim::device(0)));
  EXPECT_FALSE(event.query());
  event.synchronize();
  EXPECT_TRUE(event.query());
}

TEST(SchedulesTest, EagerWorkHasRunWhenItIsLaunched) {
  test::restart_under(Schedule::eager);
  const at::Tensor tensor = torch::ones({4}, sim::device(0));
  c10::Event event(sim::device(0).type());
  event.record(c10::impl::VirtualGuardImpl(sim::device(0).type()).getStream(sim::device(0)));
  EXPECT_TRUE(event.query());
}

TEST(AllocatorTest, CountsMemoryAndReusesIt) {
  test::restart_under(Schedule::lazy);
  const std::int64_t before = sim::memory_of(0).now;
  sim::reset_peak(0);
  const void* first = nullptr;
  {
    const at::Tensor tensor = torch::empty({1024}, sim::device(0));
    first = tensor.data_ptr();
    EXPECT_EQ(sim::memory_of(0).now - before, 4096);
  }
  EXPECT_EQ(sim::memory_of(0).now, before);
  EXPECT_EQ(sim::memory_of(0).peak - before, 4096);
  EXPECT_EQ(torch::empty({1000}, sim::device(0)).data_ptr(), first);
}

TEST(AllocatorTest, RefusesMemoryBeyondALimit) {
  test::restart_under(Schedule::lazy);
  sim::limit_memory(0, sim::memory_of(0).now + 4096);
  const auto allocated = [](std::int64_t numel) { return torch::empty({numel}, sim::device(0)); };
  const at::Tensor kept = allocated(512);
  EXPECT_THROW(allocated(1024), c10::OutOfMemoryError);
  EXPECT_NO_THROW(allocated(512));
  sim::fail_allocation_after(0, 1);
  EXPECT_NO_THROW(allocated(8));
  EXPECT_THROW(allocated(8), c10::OutOfMemoryError);
  EXPECT_NO_THROW(allocated(8));
  test::restart_under(Schedule::lazy);
  EXPECT_NO_THROW(allocated(1024));
}

}  // namespace
}  // namespace tessera
