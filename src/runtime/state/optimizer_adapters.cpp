#include "runtime/state/optimizer_adapters.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <c10/util/Type.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <typeinfo>

#include "tessera/base/error.h"

namespace tessera::state {
namespace {

namespace optim = torch::optim;
using Slots = std::vector<OptimizerAdapter::Slot>;

/// A field that Python's optimizer has, but libtorch's does not.
struct PythonField {
  std::string name;
  Value value;
  bool is_required;  // a load refuses any other value, because libtorch does not support it
};

// --- state and fields of each optimizer

template <class Visit>
void visit_fields(optim::SGDOptions& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}
Slots slots_of(optim::SGDParamState& state, const optim::SGDOptions& /*options*/) {
  return {{"momentum_buffer", &state.momentum_buffer(), false}};
}
std::int64_t* step_of(optim::SGDParamState& /*state*/) {
  return nullptr;
}

/// The fields of Adam and AdamW.
template <class Options, class Visit>
void visit_adam_fields(Options& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("betas", options.betas());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}
template <class Visit>
void visit_fields(optim::AdamOptions& options, Visit&& visit) {
  visit_adam_fields(options, visit);
}
template <class Visit>
void visit_fields(optim::AdamWOptions& options, Visit&& visit) {
  visit_adam_fields(options, visit);
}
template <class State>
Slots adam_slots(State& state, bool amsgrad) {
  return {{"exp_avg", &state.exp_avg(), true},
          {"exp_avg_sq", &state.exp_avg_sq(), true},
          {"max_exp_avg_sq", &state.max_exp_avg_sq(), amsgrad, true}};
}
Slots slots_of(optim::AdamParamState& state, const optim::AdamOptions& options) {
  return adam_slots(state, options.amsgrad());
}
Slots slots_of(optim::AdamWParamState& state, const optim::AdamWOptions& options) {
  return adam_slots(state, options.amsgrad());
}

template <class Visit>
void visit_fields(optim::AdagradOptions& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
}
Slots slots_of(optim::AdagradParamState& state, const optim::AdagradOptions& /*options*/) {
  return {{"sum", &state.sum(), true}};
}

template <class Visit>
void visit_fields(optim::RMSpropOptions& options, Visit&& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("centered", options.centered());
  visit("weight_decay", options.weight_decay());
}
Slots slots_of(optim::RMSpropParamState& state, const optim::RMSpropOptions& options) {
  return {{"square_avg", &state.square_avg(), true},
          {"momentum_buffer", &state.momentum_buffer(), options.momentum() > 0, true},
          {"grad_avg", &state.grad_avg(), options.centered(), true}};
}

template <class State>
std::int64_t* step_of(State& state) {
  return &state.step();
}

// --- fields as values

Value to_value(double number) {
  return number;
}
Value to_value(bool flag) {
  return flag;
}
Value to_value(const std::tuple<double, double>& pair) {
  return Value::Tuple{{Value(std::get<0>(pair)), Value(std::get<1>(pair))}};
}

[[noreturn]] void refuse_field(const std::string& name, const std::string& expected,
                               const Value* found) {
  throw Error::expected(ErrorKind::mismatch, {.fqn = "param_groups"}, name, expected,
                        found == nullptr ? "none" : value_to_string(*found));
}

void from_value(const std::string& name, const Value* value, double& number) {
  if (value != nullptr) {
    if (const auto* real = value->get_if<double>()) return void(number = *real);
    if (const auto* whole = value->get_if<std::int64_t>()) {
      return void(number = static_cast<double>(*whole));
    }
  }
  refuse_field(name, "a number", value);
}
void from_value(const std::string& name, const Value* value, bool& flag) {
  const auto* found = value == nullptr ? nullptr : value->get_if<bool>();
  if (found == nullptr) refuse_field(name, "a bool", value);
  flag = *found;
}
void from_value(const std::string& name, const Value* value, std::tuple<double, double>& pair) {
  const std::vector<Value>* items = nullptr;
  if (value != nullptr) {
    if (const auto* tuple = value->get_if<Value::Tuple>()) items = &tuple->items;
    if (const auto* list = value->get_if<Value::List>()) items = list;
  }
  if (items == nullptr || items->size() != 2) refuse_field(name, "two numbers", value);
  from_value(name, &(*items)[0], std::get<0>(pair));
  from_value(name, &(*items)[1], std::get<1>(pair));
}

const Value* find(const Value::Dict& fields, const std::string& name) {
  const auto it = std::ranges::find(fields, Value(name), &std::pair<Value, Value>::first);
  return it == fields.end() ? nullptr : &it->second;
}

/// An optimizer's options, and fields of a loaded group that libtorch lacks, to be saved again.
template <class Options>
struct WithCarriedFields final : Options {
  explicit WithCarriedFields(Options options) : Options(std::move(options)) {}
  std::unique_ptr<optim::OptimizerOptions> clone() const override {
    return std::make_unique<WithCarriedFields>(*this);
  }
  Value::Dict carried;
};

template <class Optimizer, class Options, class State>
class AdapterOf final : public OptimizerAdapter {
 public:
  AdapterOf(std::string name, std::vector<PythonField> python_fields, bool makes_state_at_once)
      : OptimizerAdapter(std::move(name)),
        python_fields_(std::move(python_fields)),
        makes_state_at_once_(makes_state_at_once) {}

  /// Says whether the optimizer is of this class itself. A derived class may have state of its own.
  bool fits(const optim::Optimizer& optimizer) const {
    return typeid(optimizer) == typeid(Optimizer);
  }
  bool fits_base_of(const optim::Optimizer& optimizer) const {
    return dynamic_cast<const Optimizer*>(&optimizer) != nullptr;
  }

  Slots slots(optim::OptimizerParamState& state,
              const optim::OptimizerOptions& options) const override {
    return slots_of(static_cast<State&>(state), static_cast<const Options&>(options));
  }
  std::int64_t* step(optim::OptimizerParamState& state) const override {
    return step_of(static_cast<State&>(state));
  }
  std::unique_ptr<optim::OptimizerParamState> make_state() const override {
    return std::make_unique<State>();
  }
  bool makes_state_at_once() const override { return makes_state_at_once_; }

  Value::Dict fields(const optim::OptimizerOptions& options) const override {
    // A copy, because visit_fields needs a non-const object.
    auto own = static_cast<const Options&>(options);
    Value::Dict fields;
    visit_fields(own, [&](const std::string& field_name, const auto& field) {
      fields.emplace_back(field_name, to_value(field));
    });
    const auto* const more = dynamic_cast<const WithCarriedFields<Options>*>(&options);
    for (const PythonField& field : python_fields_) {
      const Value* const found = more == nullptr ? nullptr : find(more->carried, field.name);
      fields.emplace_back(field.name, found == nullptr ? field.value : *found);
    }
    if (more == nullptr) return fields;
    for (const auto& field : more->carried) {
      const bool is_new =
          std::ranges::none_of(fields, [&](const auto& each) { return each.first == field.first; });
      if (is_new) fields.push_back(field);
    }
    return fields;
  }

  std::unique_ptr<optim::OptimizerOptions> with_fields(const Value::Dict& fields) const override {
    auto options = std::make_unique<WithCarriedFields<Options>>(Options(1e-3));
    std::vector<Value> known = {Value("params")};
    visit_fields(static_cast<Options&>(*options), [&](const std::string& field_name, auto& field) {
      from_value(field_name, find(fields, field_name), field);
      known.emplace_back(field_name);
    });
    for (const PythonField& field : python_fields_) {
      const Value* const found = find(fields, field.name);
      if (found == nullptr || !field.is_required || *found == field.value) continue;
      throw Error::expected(ErrorKind::unsupported, {.fqn = "param_groups"},
                            field.name + " of libtorch's " + name(), value_to_string(field.value),
                            value_to_string(*found), "libtorch does not have this option");
    }
    for (const auto& field : fields) {
      if (std::ranges::find(known, field.first) == known.end()) options->carried.push_back(field);
    }
    return options;
  }

 private:
  std::vector<PythonField> python_fields_;
  bool makes_state_at_once_;
};

using SgdAdapter = AdapterOf<optim::SGD, optim::SGDOptions, optim::SGDParamState>;
using AdamAdapter = AdapterOf<optim::Adam, optim::AdamOptions, optim::AdamParamState>;
using AdamWAdapter = AdapterOf<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState>;
using AdagradAdapter = AdapterOf<optim::Adagrad, optim::AdagradOptions, optim::AdagradParamState>;
using RmspropAdapter = AdapterOf<optim::RMSprop, optim::RMSpropOptions, optim::RMSpropParamState>;

}  // namespace

// Source of the fields and their defaults: torch/optim/*.py of PyTorch 2.11.
const OptimizerAdapter& OptimizerAdapter::of(const optim::Optimizer& optimizer) {
  const PythonField maximize{"maximize", false, true};
  const PythonField foreach{"foreach", Value(), false};
  const PythonField capturable{"capturable", false, false};
  const PythonField differentiable{"differentiable", false, false};
  const PythonField fused{"fused", Value(), false};
  static const SgdAdapter sgd("SGD", {maximize, foreach, differentiable, fused}, false);
  static const AdamAdapter adam("Adam",
                                {maximize,
                                 foreach,
                                 capturable,
                                 differentiable,
                                 fused,
                                 {"decoupled_weight_decay", false, true}},
                                false);
  static const AdamWAdapter adamw("AdamW",
                                  {maximize,
                                   foreach,
                                   capturable,
                                   differentiable,
                                   fused,
                                   {"decoupled_weight_decay", true, true}},
                                  false);
  static const AdagradAdapter adagrad("Adagrad", {foreach, maximize, differentiable, fused}, true);
  static const RmspropAdapter rmsprop("RMSprop", {capturable, foreach, maximize, differentiable},
                                      false);
  if (sgd.fits(optimizer)) return sgd;
  if (adam.fits(optimizer)) return adam;
  if (adamw.fits(optimizer)) return adamw;
  if (adagrad.fits(optimizer)) return adagrad;
  if (rmsprop.fits(optimizer)) return rmsprop;
  const bool is_derived = sgd.fits_base_of(optimizer) || adam.fits_base_of(optimizer) ||
                          adamw.fits_base_of(optimizer) || adagrad.fits_base_of(optimizer) ||
                          rmsprop.fits_base_of(optimizer);
  const bool is_lbfgs = dynamic_cast<const optim::LBFGS*>(&optimizer) != nullptr;
  const std::string name = c10::demangle(typeid(optimizer).name());
  throw Error::expected(
      ErrorKind::unsupported, {}, "optimizer",
      "SGD, Adam, AdamW, Adagrad or RMSprop of torch::optim",
      is_lbfgs     ? "LBFGS, whose state belongs to no single parameter"
      : is_derived ? name + ", a class derived from one of them"
                   : name,
      is_derived
          ? "state that the class adds would be lost; make torch's optimizer a member of the "
            "class, give TrainState this member, and give with() an object with state_dict() "
            "and load_state_dict(const Value&) for the added state"
          : "");
}

}  // namespace tessera::state
