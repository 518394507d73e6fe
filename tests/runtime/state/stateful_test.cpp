#include "tessera/runtime/state/stateful.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>
#include <optional>

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

// Python's schedulers take their first step when they are constructed; libtorch's do not.
// Shows C8.
TEST(StatefulTest, EpochsOfASchedulerAreThoseOfPython) {
  Schedule schedule;
  const Stateful state = stateful(schedule.scheduler);
  EXPECT_EQ(said(state), "{'last_epoch': -1}");
  EXPECT_EQ(schedule.step(), 1);
  EXPECT_EQ(said(state), "{'last_epoch': 0}");
  EXPECT_EQ(schedule.step(), 1);
  EXPECT_EQ(schedule.step(), 0.5);
  EXPECT_EQ(said(state), "{'last_epoch': 2}");
}

// Shows C8.
TEST(StatefulTest, ASchedulerGoesOnFromPythonsWithoutHalvingTwice) {
  Schedule schedule;
  schedule.optimizer.param_groups()[0].options().set_lr(0.25);  // as in Python after four epochs
  stateful(schedule.scheduler).load_state_dict(epoch(4));
  EXPECT_EQ(schedule.step(), 0.25);
  EXPECT_EQ(schedule.step(), 0.125);
}

// A resumed run has, step by step, the learning rates of a run that did not stop.
// Shows C8.
TEST(StatefulTest, AMovedRunHasTheLearningRatesOfARunThatStayed) {
  constexpr int kNumSteps = 9;
  std::vector<double> stayed;
  Schedule in_one_go;
  for (int step = 0; step < kNumSteps; ++step) stayed.push_back(in_one_go.step());
  for (int num_before = 0; num_before <= kNumSteps; ++num_before) {
    SCOPED_TRACE(num_before);
    Schedule first;
    std::vector<double> moved;
    for (int step = 0; step < num_before; ++step) moved.push_back(first.step());
    Schedule second;
    second.optimizer.param_groups()[0].options().set_lr(first.learning_rate());
    stateful(second.scheduler).load_state_dict(stateful(first.scheduler).state_dict());
    for (int step = num_before; step < kNumSteps; ++step) moved.push_back(second.step());
    EXPECT_EQ(moved, stayed);
  }
  // As Python's StepLR(…, 2, 0.5), whose constructor takes the first step.
  Schedule as_python;
  as_python.step();
  std::vector<double> rates;
  for (int step = 0; step < 5; ++step) rates.push_back(as_python.step());
  EXPECT_EQ(rates, (std::vector<double>{1, 0.5, 0.5, 0.25, 0.25}));
}

// Shows C8.
TEST(StatefulTest, AStepLrOfOtherSettingsIsRefused) {
  Schedule schedule;
  const Stateful state = stateful(schedule.scheduler);
  const auto error_of = [&](const char* field, Value value) {
    const Value saved = Value::Dict{{"last_epoch", 3}, {field, std::move(value)}};
    return test::error_of([&] { state.check(saved); });
  };
  EXPECT_EQ(error_of("step_size", 2), "none");
  EXPECT_EQ(error_of("gamma", 0.5), "none");
  EXPECT_THAT(error_of("step_size", 3), HasSubstr("step_size of a scheduler: "));
  EXPECT_THAT(error_of("step_size", 3), HasSubstr("expected 2"));
  EXPECT_THAT(error_of("gamma", 0.1), HasSubstr("found 0.1"));
}

/// A scheduler with state of its own, which its base class does not have.
struct Warmup : torch::optim::StepLR {
  using torch::optim::StepLR::StepLR;
  Value state_dict() const { return Value::Dict{{"warm", warm}}; }
  void load_state_dict(const Value& value) { warm = integer_in(*value.find("warm")); }
  std::int64_t warm = 5;
};

// Shows C8.
TEST(StatefulTest, WhatASchedulerSaysOfItselfComesFirst) {
  torch::optim::SGD optimizer{{torch::ones({1})}, torch::optim::SGDOptions(1)};
  Warmup scheduler(optimizer, 2, 0.5);
  const Stateful state = stateful(scheduler);
  EXPECT_EQ(said(state), "{'warm': 5}");
  state.load_state_dict(Value::Dict{{"warm", 7}});
  EXPECT_EQ(scheduler.warm, 7);
}

using Plateau = torch::optim::ReduceLROnPlateauScheduler;

/// Two groups with learning rate 1, which halves after two losses without improvement.
struct PlateauSchedule {
  explicit PlateauSchedule(int patience = 1, int cooldown = 1)
      : scheduler(optimizer, Plateau::min, 0.5, patience, 1e-4, Plateau::rel, cooldown,
                  {0.125, 0}) {}
  torch::optim::SGD optimizer{{torch::optim::OptimizerParamGroup({torch::ones({1})}),
                               torch::optim::OptimizerParamGroup({torch::ones({1})})},
                              torch::optim::SGDOptions(1)};
  Plateau scheduler;

  std::vector<double> rates() {
    return {optimizer.param_groups()[0].options().get_lr(),
            optimizer.param_groups()[1].options().get_lr()};
  }
  std::vector<double> step(int number) {
    scheduler.step(number < 2 ? 4.0F - static_cast<float>(number) : 3.5F);
    return rates();
  }
};

// Names and values of a ReduceLROnPlateau of PyTorch 2.11, but `_last_lr`.
// Shows C8.
TEST(StatefulTest, APlateauSchedulerHasTheFieldsOfPython) {
  PlateauSchedule schedule;
  const Stateful state = stateful(schedule.scheduler);
  std::vector<std::string> names;
  const Value fresh = state.state_dict();
  for (const auto& [key, value] : *fresh.get_if<Value::Dict>()) {
    names.push_back(*key.get_if<std::string>());
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre(
                         "factor", "default_min_lr", "min_lrs", "patience", "cooldown", "eps",
                         "last_epoch", "mode_worse", "mode", "threshold", "threshold_mode", "best",
                         "cooldown_counter", "num_bad_epochs"));
  EXPECT_EQ(*fresh.find("best"), Value(std::numeric_limits<double>::infinity()));
  EXPECT_EQ(*fresh.find("mode_worse"), Value(std::numeric_limits<double>::infinity()));
  EXPECT_EQ(*fresh.find("mode"), Value("min"));
  EXPECT_EQ(*fresh.find("threshold_mode"), Value("rel"));
  EXPECT_EQ(*fresh.find("default_min_lr"), Value());
  EXPECT_EQ(*fresh.find("min_lrs"), Value(Value::List{0.125, 0.0}));
  for (int i = 0; i < 4; ++i) schedule.step(i);
  const Value after = state.state_dict();
  EXPECT_EQ(*after.find("best"), Value(3.0));
  EXPECT_EQ(*after.find("last_epoch"), Value(4));
  EXPECT_EQ(*after.find("num_bad_epochs"), Value(0));
  EXPECT_EQ(*after.find("cooldown_counter"), Value(1));
}

// Shows C8.
TEST(StatefulTest, APlateauSchedulerGoesOnWhereItStopped) {
  constexpr int kNumSteps = 14;
  std::vector<std::vector<double>> stayed;
  PlateauSchedule in_one_go;
  for (int step = 0; step < kNumSteps; ++step) stayed.push_back(in_one_go.step(step));
  EXPECT_EQ(stayed.back(), (std::vector<double>{0.125, 0.0625}));
  for (int num_before = 0; num_before <= kNumSteps; ++num_before) {
    SCOPED_TRACE(num_before);
    PlateauSchedule first;
    std::vector<std::vector<double>> moved;
    for (int step = 0; step < num_before; ++step) moved.push_back(first.step(step));
    PlateauSchedule second(/*patience=*/7, /*cooldown=*/3);  // what is loaded decides
    for (std::size_t group = 0; group < 2; ++group) {
      second.optimizer.param_groups()[group].options().set_lr(first.rates()[group]);
    }
    stateful(second.scheduler).load_state_dict(stateful(first.scheduler).state_dict());
    for (int step = num_before; step < kNumSteps; ++step) moved.push_back(second.step(step));
    EXPECT_EQ(moved, stayed);
  }
}

// Shows C8.
TEST(StatefulTest, APlateauStateThatDoesNotFitIsRefusedAndChangesNothing) {
  PlateauSchedule schedule;
  schedule.step(0);
  const Stateful state = stateful(schedule.scheduler);
  const std::string before = said(state);
  const auto with = [&](const std::string& field, const std::optional<Value>& value) {
    Value::Dict saved = *state.state_dict().get_if<Value::Dict>();
    std::erase_if(saved, [&](const auto& item) { return item.first == Value(field); });
    if (value) saved.emplace_back(field, *value);
    EXPECT_EQ(test::error_of([&] { state.check(saved); }),
              test::error_of([&] { state.load_state_dict(saved); }));
    return test::error_of([&] { state.load_state_dict(saved); });
  };
  EXPECT_THAT(with("best", std::nullopt),
              HasSubstr("best of a scheduler: expected a number, found none"));
  EXPECT_THAT(with("best", "none"), HasSubstr("best of a scheduler"));
  EXPECT_THAT(with("num_bad_epochs", -1), HasSubstr("0 or more"));
  EXPECT_THAT(with("mode", "most"), HasSubstr("'min' or 'max'"));
  EXPECT_THAT(with("min_lrs", Value::List{0.5}), HasSubstr("the optimizer's 2 groups"));
  EXPECT_EQ(said(state), before);
  EXPECT_EQ(with("patience", std::nullopt), "none");
}

// Shows C8.
TEST(StatefulTest, ASchedulersEpochThatMakesNoSenseIsRefused) {
  Schedule schedule;
  const auto load = [&](const Value& value) {
    return test::error_of([&] { stateful(schedule.scheduler).load_state_dict(value); });
  };
  EXPECT_THAT(load(Value::Dict{}), HasSubstr("an integer"));
  EXPECT_THAT(load(epoch(-2)), HasSubstr("-2"));
}

/// One group with learning rate 1, which halves after two metrics without improvement.
struct RisingSchedule {
  torch::optim::SGD optimizer{{torch::ones({1})}, torch::optim::SGDOptions(1)};
  Plateau scheduler{optimizer, Plateau::max, 0.5, 1};

  double step(float metric) {
    scheduler.step(metric);
    return optimizer.param_groups()[0].options().get_lr();
  }
};

// Also with metrics below 0, which libtorch never takes for an improvement at first.
// Shows C8.
TEST(StatefulTest, APlateauSchedulerOfModeMaxGoesOnWhereItStopped) {
  constexpr int kNumSteps = 10;
  for (const float first_metric : {0.5F, -8.0F}) {
    const auto metric_of = [&](int step) {
      return first_metric + static_cast<float>(step < 3 ? step : 3);
    };
    std::vector<double> stayed;
    RisingSchedule in_one_go;
    for (int step = 0; step < kNumSteps; ++step) stayed.push_back(in_one_go.step(metric_of(step)));
    EXPECT_LT(stayed.back(), 1);
    for (int num_before = 0; num_before <= kNumSteps; ++num_before) {
      SCOPED_TRACE(num_before);
      RisingSchedule first;
      std::vector<double> moved;
      for (int step = 0; step < num_before; ++step) moved.push_back(first.step(metric_of(step)));
      RisingSchedule second;
      second.optimizer.param_groups()[0].options().set_lr(
          first.optimizer.param_groups()[0].options().get_lr());
      stateful(second.scheduler).load_state_dict(stateful(first.scheduler).state_dict());
      for (int step = num_before; step < kNumSteps; ++step) {
        moved.push_back(second.step(metric_of(step)));
      }
      EXPECT_EQ(moved, stayed);
    }
  }
}

// Shows C8.
TEST(StatefulTest, AnUnsignedNumberBeyondSigned64BitsIsKept) {
  std::uint64_t seed = std::numeric_limits<std::uint64_t>::max();
  const Value saved = stateful(seed).state_dict();
  EXPECT_EQ(saved, Value(Value::BigInt{"18446744073709551615"}));
  seed = 0;
  stateful(seed).load_state_dict(saved);
  EXPECT_EQ(seed, std::numeric_limits<std::uint64_t>::max());
  seed = 7;
  EXPECT_EQ(stateful(seed).state_dict(), Value(7));
  std::int64_t number = 0;
  EXPECT_THAT(test::error_of([&] { stateful(number).check(saved); }),
              HasSubstr("expected a number that the variable can hold, found "
                        "18446744073709551615"));
  const Value too_big = Value::BigInt{"18446744073709551616"};
  EXPECT_THAT(test::error_of([&] { stateful(seed).check(too_big); }),
              HasSubstr("expected a number that the variable can hold"));
  EXPECT_THAT(test::error_of([&] { stateful(seed).check(Value(-1)); }),
              HasSubstr("expected a number that the variable can hold"));
}

}  // namespace
}  // namespace tessera
