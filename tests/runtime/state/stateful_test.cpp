#include "tessera/runtime/state/stateful.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// A learning rate of 1 that halves every second epoch.
struct Schedule {
  torch::optim::SGD optimizer{{torch::ones({1})}, torch::optim::SGDOptions(1)};
  torch::optim::StepLR scheduler{optimizer, 2, 0.5};

  double step() {
    scheduler.step();
    return learning_rate();
  }
  double learning_rate() { return optimizer.param_groups()[0].options().get_lr(); }
};

Value epoch(int number) {
  return Value::Dict{{"last_epoch", number}};
}

std::string said(const Stateful& state) {
  return value_to_string(state.state_dict());
}

// Python's schedulers take their first step when they are made, those of libtorch do not.
TEST(StatefulTest, C8_EpochsOfASchedulerAreThoseOfPython) {
  Schedule schedule;
  const Stateful state = stateful(schedule.scheduler);
  EXPECT_EQ(said(state), "{'last_epoch': -1}");
  EXPECT_EQ(schedule.step(), 1);
  EXPECT_EQ(said(state), "{'last_epoch': 0}");
  EXPECT_EQ(schedule.step(), 1);
  EXPECT_EQ(schedule.step(), 0.5);
  EXPECT_EQ(said(state), "{'last_epoch': 2}");
}

TEST(StatefulTest, C8_ASchedulerGoesOnFromPythonsWithoutHalvingTwice) {
  Schedule schedule;
  schedule.optimizer.param_groups()[0].options().set_lr(0.25);  // as Python has it by then
  stateful(schedule.scheduler).load_state_dict(epoch(4));
  EXPECT_EQ(schedule.step(), 0.25);
  EXPECT_EQ(schedule.step(), 0.125);
}

TEST(StatefulTest, C8_ASchedulersEpochThatMakesNoSenseIsRefused) {
  Schedule schedule;
  const auto load = [&](const Value& value) {
    return test::error_of([&] { stateful(schedule.scheduler).load_state_dict(value); });
  };
  EXPECT_THAT(load(Value::Dict{}), HasSubstr("an integer"));
  EXPECT_THAT(load(epoch(-2)), HasSubstr("-2"));
}

}  // namespace
}  // namespace tessera
