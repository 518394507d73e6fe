#include <torch/optim/schedulers/step_lr.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/runtime/state/stateful.h"

namespace tessera {
namespace {

using torch::optim::LRScheduler;
using torch::optim::StepLR;
using Plateau = torch::optim::ReduceLROnPlateauScheduler;

// [Note: Private members of libtorch's schedulers]
// These members have no accessors. C++20 lets an explicit instantiation name a private member
// (temp.spec.general, paragraph 6). Each `Expose…` defines a function that returns such members.

struct StepLrMembers {
  const unsigned StepLR::*step_size;
  const double StepLR::*gamma;
};
StepLrMembers step_lr_members();
template <auto... kMembers>
struct ExposeStepLr {
  friend StepLrMembers step_lr_members() { return {kMembers...}; }
};
template struct ExposeStepLr<&StepLR::step_size_, &StepLR::gamma_>;

struct PlateauMembers {
  Plateau::SchedulerMode Plateau::*mode;
  float Plateau::*factor;
  int Plateau::*patience;
  double Plateau::*threshold;
  Plateau::ThresholdMode Plateau::*threshold_mode;
  int Plateau::*cooldown;
  int Plateau::*cooldown_counter;
  std::vector<float> Plateau::*min_lrs;
  double Plateau::*eps;
  float Plateau::*mode_worse;
  float Plateau::*best;
  int Plateau::*last_epoch;
  int Plateau::*num_bad_epochs;
};
PlateauMembers plateau_members();
template <auto... kMembers>
struct ExposePlateau {
  friend PlateauMembers plateau_members() { return {kMembers...}; }
};
template struct ExposePlateau<&Plateau::mode, &Plateau::factor, &Plateau::patience,
                              &Plateau::threshold, &Plateau::threshold_mode, &Plateau::cooldown,
                              &Plateau::cooldown_counter, &Plateau::min_lrs, &Plateau::eps,
                              &Plateau::mode_worse, &Plateau::best, &Plateau::last_epoch,
                              &Plateau::num_bad_epochs>;

/// Gives access to a protected member: a derived class may make a pointer to it.
struct LrAccess : LRScheduler {
  static auto step_count() { return &LrAccess::step_count_; }
};

[[noreturn]] void refuse(const std::string& field, const std::string& expected,
                         const std::string& found, const std::string& likely_cause = {}) {
  throw Error::expected(ErrorKind::mismatch, {}, field + " of a scheduler", expected, found,
                        likely_cause);
}

/// Calls `take` with a field's value, if there is one.
template <class Take>
void read_field(const Value& state, const std::string& field, const Take& take) {
  const Value* const found = state.find(field);
  if (found == nullptr) return;
  try {
    take(*found);
  } catch (const Error& error) {
    throw Error(error.kind(), {}, field + " of a scheduler: " + std::string(error.reason()));
  }
}

void require_field(const Value& state, const std::string& field, const std::string& expected) {
  if (state.find(field) == nullptr) refuse(field, expected, "none");
}

/// Returns the step count of a libtorch scheduler for Python's `last_epoch`. The step count is one
/// more than `last_epoch`, because Python's scheduler takes a step when it is constructed.
unsigned steps_at_epoch(const Value& state) {
  require_field(state, "last_epoch", "an integer");
  std::int64_t epoch = 0;
  read_field(state, "last_epoch", [&](const Value& value) { epoch = integer_in(value); });
  if (epoch < -1 || epoch >= std::numeric_limits<unsigned>::max()) {
    refuse("last_epoch", "-1 or more", std::to_string(epoch));
  }
  return static_cast<unsigned>(epoch + 1);
}

/// Throws if `state` has other settings than `scheduler`, because libtorch cannot change the
/// settings of a StepLR.
void check_step_lr(const StepLR& scheduler, const Value& state) {
  const auto check = [&](const std::string& field, double own) {
    read_field(state, field, [&](const Value& value) {
      if (number_in(value) == own) return;
      throw Error::expected(ErrorKind::mismatch, {}, "value in the checkpoint",
                            value_to_string(Value(own)) + ", as this StepLR has",
                            value_to_string(value),
                            "construct the StepLR with the checkpoint's value");
    });
  };
  check("step_size", scheduler.*step_lr_members().step_size);
  check("gamma", scheduler.*step_lr_members().gamma);
}

unsigned checked_steps(const LRScheduler& scheduler, const Value& state) {
  if (const auto* step_lr = dynamic_cast<const StepLR*>(&scheduler)) check_step_lr(*step_lr, state);
  return steps_at_epoch(state);
}

// --- ReduceLROnPlateau

constexpr const char* kModes[] = {"min", "max"};           // indexed by Plateau::SchedulerMode
constexpr const char* kThresholdModes[] = {"rel", "abs"};  // indexed by Plateau::ThresholdMode

template <class Enum>
Enum parse(const char* const (&names)[2], const Value& value) {
  const std::string text = text_in(value);
  if (text == names[0]) return static_cast<Enum>(0);
  if (text == names[1]) return static_cast<Enum>(1);
  throw Error::expected(ErrorKind::mismatch, {}, "value",
                        "'" + std::string(names[0]) + "' or '" + names[1] + "'", "'" + text + "'");
}

double infinity_of(Plateau::SchedulerMode mode) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return mode == Plateau::min ? kInfinity : -kInfinity;
}

/// Returns the fields of Python's class except `_last_lr`, which repeats the optimizer's lr.
Value state_of(const Plateau& scheduler) {
  const PlateauMembers members = plateau_members();
  const Plateau::SchedulerMode mode = scheduler.*members.mode;
  const std::vector<float>& min_lrs = scheduler.*members.min_lrs;
  Value::List min_lr_list;
  bool is_one_min_lr = !min_lrs.empty();
  for (const float min_lr : min_lrs) {
    min_lr_list.emplace_back(static_cast<double>(min_lr));
    is_one_min_lr = is_one_min_lr && min_lr == min_lrs.front();
  }
  const Value default_min_lr =
      is_one_min_lr ? Value(static_cast<double>(min_lrs.front())) : Value();
  // Before the first step, `best` is a finite float in libtorch, and infinite in Python. With the
  // mode max, libtorch's is positive: then metrics below it are no improvement, so it is kept.
  const bool is_new = scheduler.*members.best == scheduler.*members.mode_worse;
  const double best = is_new && mode == Plateau::min ? infinity_of(mode) : scheduler.*members.best;
  const auto integer = [](int number) { return Value(static_cast<std::int64_t>(number)); };
  return Value::Dict{
      {"mode", kModes[mode]},
      {"factor", static_cast<double>(scheduler.*members.factor)},
      {"patience", integer(scheduler.*members.patience)},
      {"threshold", scheduler.*members.threshold},
      {"threshold_mode", kThresholdModes[scheduler.*members.threshold_mode]},
      {"cooldown", integer(scheduler.*members.cooldown)},
      {"cooldown_counter", integer(scheduler.*members.cooldown_counter)},
      {"default_min_lr", default_min_lr},
      {"min_lrs", std::move(min_lr_list)},
      {"eps", scheduler.*members.eps},
      {"mode_worse", infinity_of(mode)},
      {"best", best},
      {"last_epoch", integer(scheduler.*members.last_epoch)},
      {"num_bad_epochs", integer(scheduler.*members.num_bad_epochs)},
  };
}

/// Returns `scheduler` with the loaded state. Settings that `state` lacks do not change; fields
/// that change in each step are required. Throws: Error(mismatch) naming a field.
Plateau with_state(const Plateau& scheduler, const Value& state) {
  const PlateauMembers members = plateau_members();
  for (const char* const field : {"best", "num_bad_epochs", "cooldown_counter", "last_epoch"}) {
    require_field(state, field, "a number");
  }
  Plateau result = scheduler;
  const auto take_integer = [&](const std::string& field, int Plateau::*member) {
    read_field(state, field, [&](const Value& value) {
      result.*member = detail::integer_as<int>(value);
      if (result.*member >= 0) return;
      throw Error::expected(ErrorKind::mismatch, {}, "value", "0 or more", value_to_string(value));
    });
  };
  const auto take_number = [&](const std::string& field, auto member) {
    read_field(state, field, [&](const Value& value) {
      using Number = std::remove_reference_t<decltype(result.*member)>;
      result.*member = detail::number_as<Number>(value);
    });
  };
  read_field(state, "mode", [&](const Value& value) {
    result.*members.mode = parse<Plateau::SchedulerMode>(kModes, value);
    // As in the constructor of libtorch's class.
    result.*members.mode_worse = result.*members.mode == Plateau::min
                                     ? std::numeric_limits<float>::max()
                                     : std::numeric_limits<float>::min();
  });
  read_field(state, "threshold_mode", [&](const Value& value) {
    result.*members.threshold_mode = parse<Plateau::ThresholdMode>(kThresholdModes, value);
  });
  take_number("factor", members.factor);
  take_number("threshold", members.threshold);
  take_number("eps", members.eps);
  take_number("best", members.best);
  take_integer("patience", members.patience);
  take_integer("cooldown", members.cooldown);
  take_integer("cooldown_counter", members.cooldown_counter);
  take_integer("last_epoch", members.last_epoch);
  take_integer("num_bad_epochs", members.num_bad_epochs);
  read_field(state, "min_lrs", [&](const Value& value) {
    const auto* const list = value.get_if<Value::List>();
    std::vector<float>& min_lrs = result.*members.min_lrs;
    if (list == nullptr || list->size() != min_lrs.size()) {
      throw Error::expected(
          ErrorKind::mismatch, {}, "value",
          "a number for each of the optimizer's " + std::to_string(min_lrs.size()) + " groups",
          value_to_string(value));
    }
    for (std::size_t i = 0; i < min_lrs.size(); ++i) {
      min_lrs[i] = detail::number_as<float>((*list)[i]);
    }
  });
  return result;
}

/// Copies all members that `with_state` may change, because libtorch's class is not assignable.
void take(const Plateau& from, Plateau& to) {
  const PlateauMembers members = plateau_members();
  to.*members.mode = from.*members.mode;
  to.*members.factor = from.*members.factor;
  to.*members.patience = from.*members.patience;
  to.*members.threshold = from.*members.threshold;
  to.*members.threshold_mode = from.*members.threshold_mode;
  to.*members.cooldown = from.*members.cooldown;
  to.*members.cooldown_counter = from.*members.cooldown_counter;
  to.*members.min_lrs = from.*members.min_lrs;
  to.*members.eps = from.*members.eps;
  to.*members.mode_worse = from.*members.mode_worse;
  to.*members.best = from.*members.best;
  to.*members.last_epoch = from.*members.last_epoch;
  to.*members.num_bad_epochs = from.*members.num_bad_epochs;
}

}  // namespace

Stateful detail::stateful_scheduler(LRScheduler& scheduler) {
  return {[&scheduler] {
            const auto count = static_cast<std::int64_t>(scheduler.*LrAccess::step_count());
            return Value(Value::Dict{{"last_epoch", count - 1}});
          },
          [&scheduler](const Value& value) {
            scheduler.*LrAccess::step_count() = checked_steps(scheduler, value);
          },
          {},
          [&scheduler](const Value& value) { checked_steps(scheduler, value); }};
}

Stateful detail::stateful_scheduler(Plateau& scheduler) {
  return {[&scheduler] { return state_of(scheduler); },
          [&scheduler](const Value& value) { take(with_state(scheduler, value), scheduler); },
          {},
          [&scheduler](const Value& value) { with_state(scheduler, value); }};
}

}  // namespace tessera
