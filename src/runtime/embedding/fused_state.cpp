#include "runtime/embedding/fused_state.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>

#include "runtime/embedding/table_memory.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

using formats::StateKind;

template <class Optimizer>
constexpr bool kIsAdam = std::is_same_v<Optimizer, Adam> || std::is_same_v<Optimizer, RowWiseAdam>;
/// Calls `visit(name, value)` for each setting of an optimizer except Adam's betas.
template <class Optimizer, class Visit>
void for_each_number(Optimizer& optimizer, const Visit& visit) {
  using Plain = std::remove_const_t<Optimizer>;
  visit("lr", optimizer.lr);
  if constexpr (!std::is_same_v<Plain, Sgd>) visit("eps", optimizer.eps);
  visit("weight_decay", optimizer.weight_decay);
  visit("max_gradient", optimizer.max_gradient);
}

/// Returns an error about the field `name` of a parameter group. The caller adds the group.
Error unfit(const std::string& name, const std::string& expected, const std::string& found) {
  return Error::expected(ErrorKind::mismatch, {}, "field " + name, expected, found);
}

const Value& field(const Value::Dict& fields, const std::string& name) {
  const auto it =
      std::ranges::find_if(fields, [&](const auto& each) { return each.first == Value(name); });
  if (it == fields.end()) throw unfit(name, "a value", "none");
  return it->second;
}

double number(const std::string& name, const Value& value) {
  if (const auto* const real = value.get_if<double>()) return *real;
  if (const auto* const integer = value.get_if<std::int64_t>()) {
    return static_cast<double>(*integer);
  }
  throw unfit(name, "a number", value_to_string(value));
}

/// Returns the two numbers of a list or tuple such as `betas`.
std::pair<double, double> two_numbers(const std::string& name, const Value& value) {
  const auto* const tuple = value.get_if<Value::Tuple>();
  const auto* const list = tuple != nullptr ? &tuple->items : value.get_if<Value::List>();
  if (list == nullptr || list->size() != 2) {
    throw unfit(name, "two numbers", value_to_string(value));
  }
  return {number(name, list->front()), number(name, list->back())};
}

}  // namespace

std::string_view name_of(const FusedOptimizer& optimizer) {
  constexpr std::string_view kNames[] = {"sgd", "adagrad", "row_wise_adagrad", "adam",
                                         "row_wise_adam"};
  return kNames[optimizer.index()];
}

float* FusedState::data(const std::string& name) const {
  const auto it = std::ranges::find(slots, name, &Slot::name);
  return it == slots.end() ? nullptr : it->tensor.mutable_data_ptr<float>();
}

FusedState initial_state(const FusedOptimizer& optimizer, std::int64_t rows, std::int64_t columns,
                         at::Device device) {
  return initial_state(optimizer, rows, columns, [&](at::IntArrayRef shape) {
    return table_memory(shape, at::kFloat, device);
  });
}

FusedState initial_state(const FusedOptimizer& optimizer, std::int64_t rows, std::int64_t columns,
                         const std::function<at::Tensor(at::IntArrayRef)>& float_memory) {
  FusedState state;
  const auto pointwise = [&](const char* name) {
    state.slots.push_back({name, StateKind::pointwise, float_memory({rows, columns}).zero_()});
  };
  const auto row_wise = [&](const char* name) {
    state.slots.push_back({name, StateKind::row_wise, float_memory({rows}).zero_()});
  };
  std::visit(
      [&](const auto& each) {
        using Optimizer = std::decay_t<decltype(each)>;
        if constexpr (std::is_same_v<Optimizer, Adagrad>) pointwise("sum");
        if constexpr (std::is_same_v<Optimizer, RowWiseAdagrad>) row_wise("row_sum");
        if constexpr (kIsAdam<Optimizer>) pointwise("exp_avg");
        if constexpr (std::is_same_v<Optimizer, Adam>) pointwise("exp_avg_sq");
        if constexpr (std::is_same_v<Optimizer, RowWiseAdam>) row_wise("row_exp_avg_sq");
      },
      optimizer);
  return state;
}

bool counts_steps(const FusedOptimizer& optimizer) {
  return std::visit([](const auto& each) { return kIsAdam<std::decay_t<decltype(each)>>; },
                    optimizer);
}

void check_numbers(const FusedOptimizer& optimizer) {
  const auto require = [](bool holds, const std::string& name, const std::string& expected,
                          double found) {
    if (holds) return;
    throw Error::expected(ErrorKind::invalid_argument, {},
                          "setting " + name + " of a fused optimizer", expected,
                          value_to_string(Value(found)));
  };
  std::visit(
      [&](const auto& each) {
        for_each_number(each, [&](const std::string& name, double number) {
          require(std::isfinite(number) && number >= 0, name, "0 or more", number);
        });
        if constexpr (kIsAdam<std::decay_t<decltype(each)>>) {
          require(each.beta1 >= 0 && each.beta1 < 1, "beta1", "at least 0 and below 1", each.beta1);
          require(each.beta2 >= 0 && each.beta2 < 1, "beta2", "at least 0 and below 1", each.beta2);
        }
      },
      optimizer);
}

Value::Dict fields_of(const FusedOptimizer& optimizer) {
  Value::Dict fields;
  fields.emplace_back(std::string("optimizer"), std::string(name_of(optimizer)));
  std::visit(
      [&](const auto& each) {
        for_each_number(each, [&](const std::string& name, double number) {
          fields.emplace_back(name, number);
        });
        if constexpr (kIsAdam<std::decay_t<decltype(each)>>) {
          fields.emplace_back(std::string("betas"), Value::Tuple{{each.beta1, each.beta2}});
        }
      },
      optimizer);
  return fields;
}

FusedOptimizer with_fields(const FusedOptimizer& optimizer, const Value::Dict& fields) {
  const Value& saved = field(fields, "optimizer");
  const std::string name(name_of(optimizer));
  if (!(saved == Value(name))) throw unfit("optimizer", name, value_to_string(saved));
  FusedOptimizer result = optimizer;
  std::visit(
      [&](auto& each) {
        for_each_number(each, [&](const std::string& key, double& to) {
          to = number(key, field(fields, key));
        });
        if constexpr (kIsAdam<std::decay_t<decltype(each)>>) {
          std::tie(each.beta1, each.beta2) = two_numbers("betas", field(fields, "betas"));
        }
      },
      result);
  check_numbers(result);
  return result;
}

}  // namespace tessera::embedding
