#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#include "tessera/base/value.h"

namespace tessera {

/// Functions that read and set an item of a trainer's state, such as a step counter. A Stateful
/// that `stateful` returns refers to an object; this object must outlive the Stateful.
struct Stateful {
  std::function<Value()> state_dict;  // returns the item's value, to be saved
  /// Sets the item to a saved value. Throws if the item cannot take that value.
  std::function<void(const Value&)> load_state_dict;
  /// For PerRank::split of values that are not lists. Makes the value of a rank that did not exist
  /// at the save, from the `saved` value of another rank. Empty: a split of such values throws
  /// Error(mismatch).
  std::function<Value(const Value& saved, int rank)> branch{};
  /// Throws what `load_state_dict` would throw, but changes nothing. A load calls it before it
  /// replaces anything. Empty: no check.
  std::function<void(const Value&)> check{};
};

/// Returns the integer in a value. Throws: Error(mismatch) if it is not an integer.
std::int64_t integer_in(const Value& value);
/// Returns the number in a value, integer or not. Throws: Error(mismatch) if it is not a number.
double number_in(const Value& value);
/// Returns the bool in a value. Throws: Error(mismatch) if it is not a bool.
bool flag_in(const Value& value);
/// Returns the string in a value. Throws: Error(mismatch) if it is not a string.
std::string text_in(const Value& value);

namespace detail {
[[noreturn]] void refuse_number(const Value& value);
/// Returns an integer as a value: a BigInt if it is beyond 64 bits with a sign.
template <class T>
Value integer_value(T integer) {
  if (std::in_range<std::int64_t>(integer)) return Value(static_cast<std::int64_t>(integer));
  return Value::BigInt{std::to_string(integer)};
}
/// Returns the integer in a value. Throws: Error(mismatch) if it is not an integer that T can hold.
template <class T>
T integer_as(const Value& value) {
  if (const auto* const big = value.get_if<Value::BigInt>()) {
    T integer{};
    const char* const end = big->decimal.data() + big->decimal.size();
    const auto [last, error] = std::from_chars(big->decimal.data(), end, integer);
    if (error != std::errc() || last != end) refuse_number(value);
    return integer;
  }
  const std::int64_t integer = integer_in(value);
  if (!std::in_range<T>(integer)) refuse_number(value);
  return static_cast<T>(integer);
}
template <class T>
T number_as(const Value& value) {
  const double number = number_in(value);
  if (std::isfinite(number) && std::abs(number) > std::numeric_limits<T>::max()) {
    refuse_number(value);
  }
  return static_cast<T>(number);
}
/// Returns what `stateful` returns for a scheduler of libtorch.
Stateful stateful_scheduler(torch::optim::LRScheduler& scheduler);
Stateful stateful_scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler);

/// A class with state_dict and load_state_dict.
template <class T>
concept HasStateDict = requires(T& object, const Value& value) {
  Value(object.state_dict());
  object.load_state_dict(value);
};
}  // namespace detail

/// Returns functions that read and set `object`. The first case that fits decides:
/// - a `Stateful`, a `Value`, an integer, a floating-point number, a bool or a std::string;
/// - any type with `Value state_dict() const` and `load_state_dict(const Value&)`, also a subclass
///   of a scheduler: calls these two functions, and saves nothing else;
/// - a torch::optim::LRScheduler: `{"last_epoch": …}`, counted so that a run that moves between
///   Python and C++ keeps its learning rates. A StepLR refuses a state with another step_size or
///   gamma; only states that Python saved have these fields;
/// - a torch::optim::ReduceLROnPlateauScheduler: all fields of Python's ReduceLROnPlateau but
///   `_last_lr`. Loading also replaces settings (`factor`, `patience`, …), as in Python.
template <class T>
Stateful stateful(T& object) {
  if constexpr (std::is_same_v<T, Stateful>) {
    return object;
  } else if constexpr (std::is_same_v<T, Value>) {
    return {[&object] { return object; }, [&object](const Value& value) { object = value; }};
  } else if constexpr (std::is_same_v<T, bool>) {
    return {[&object] { return Value(object); },
            [&object](const Value& value) { object = flag_in(value); },
            {},
            [](const Value& value) { flag_in(value); }};
  } else if constexpr (std::is_integral_v<T>) {
    return {[&object] { return detail::integer_value(object); },
            [&object](const Value& value) { object = detail::integer_as<T>(value); },
            {},
            [](const Value& value) { detail::integer_as<T>(value); }};
  } else if constexpr (std::is_floating_point_v<T>) {
    return {[&object] { return Value(static_cast<double>(object)); },
            [&object](const Value& value) { object = detail::number_as<T>(value); },
            {},
            [](const Value& value) { detail::number_as<T>(value); }};
  } else if constexpr (std::is_same_v<T, std::string>) {
    return {[&object] { return Value(object); },
            [&object](const Value& value) { object = text_in(value); },
            {},
            [](const Value& value) { text_in(value); }};
  } else if constexpr (detail::HasStateDict<T>) {
    return {[&object] { return Value(object.state_dict()); },
            [&object](const Value& value) { object.load_state_dict(value); }};
  } else {
    static_assert(std::is_base_of_v<torch::optim::LRScheduler, T> ||
                      std::is_base_of_v<torch::optim::ReduceLROnPlateauScheduler, T>,
                  "TrainState takes a tessera::Value, a number, a bool, a std::string, a "
                  "scheduler, or an object with state_dict() and load_state_dict(const Value&)");
    return detail::stateful_scheduler(object);
  }
}

/// Returns functions that read and set the CPU's default generator, for `TrainState::per_rank`.
/// With PerRank::split, ranks that did not exist at the save get random numbers of their own.
Stateful cpu_rng();

}  // namespace tessera
