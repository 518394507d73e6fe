#include "runtime/state/optimizer_load.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "runtime/state/optimizer_groups.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::state {
namespace {

std::string prefix_of(const OptimizerParameter& parameter) {
  return "state." + parameter.fqn + ".";
}

/// Returns the dtype of the saved tensor with this name; float32 if there is none.
DType dtype_in(const std::map<std::string, SavedTensor>& saved, const std::string& name) {
  const auto it = saved.find(name);
  return it == saved.end() ? DType::float32 : it->second.dtype;
}

bool fits(const at::Tensor& slot, const at::Tensor& parameter) {
  return slot.defined() && slot.is_contiguous() && slot.sizes() == parameter.sizes() &&
         slot.device() == parameter.device();
}

/// Returns `adapter.with_fields(fields)`. Adds the group to errors about its fields.
std::unique_ptr<torch::optim::OptimizerOptions> options_with(const OptimizerAdapter& adapter,
                                                             const Value::Dict& fields,
                                                             std::size_t group,
                                                             const std::string& fqn) {
  try {
    return adapter.with_fields(fields);
  } catch (const Error& error) {
    throw Error(
        error.kind(), {.fqn = fqn},
        "group " + std::to_string(group) + " of the optimizer: " + std::string(error.reason()));
  }
}

/// Calls `updates.check_fields(fields)`. Adds the group's parameters, which `fqns` names, to errors
/// about its fields.
void check_fields_of(const registry::FusedUpdates& updates, const Value::Dict& fields,
                     const std::vector<std::string>& fqns) {
  try {
    updates.check_fields(fields);
  } catch (const Error& error) {
    const std::string others =
        fqns.size() > 1 ? " and " + std::to_string(fqns.size() - 1) + " more" : "";
    throw Error(
        error.kind(), {.fqn = fqns.empty() ? "" : fqns.front()},
        "parameter group with this parameter" + others + ": " + std::string(error.reason()));
  }
}

}  // namespace

OptimizerLoad::OptimizerLoad(torch::nn::Module& model, torch::optim::Optimizer* optimizer)
    : optimizer_(optimizer), adapter_(optimizer ? &OptimizerAdapter::of(*optimizer) : nullptr) {
  if (optimizer_ != nullptr) {
    parameters_ = parameters_of(model, *optimizer_);
    options_.resize(optimizer_->param_groups().size());
  }
  const ParameterKeys keys(model);
  for (const auto& each : model.named_parameters()) {
    names_in_model_.insert(each.key());
    names_in_model_.insert(keys.of(each.key()));
  }
  auto all_fused = registry::find_fused_updates(model);
  for (auto& found : all_fused) {
    auto parameters = found.updates->parameters();
    std::vector<std::string> fqns;
    for (const auto& parameter : parameters) {
      fqns.push_back(keys.of(found.prefix + parameter.name));
    }
    fused_.push_back({std::move(found), std::move(parameters), std::move(fqns), std::nullopt});
  }
}

StateDict OptimizerLoad::want(const std::map<std::string, SavedTensor>& saved) {
  StateDict wanted;
  for (const OptimizerParameter& parameter : parameters_) {
    loaded_.push_back(want_of(parameter, saved, wanted));
  }
  for (const Fused& each : fused_) {
    for (std::size_t i = 0; i < each.parameters.size(); ++i) {
      want_fused(each.parameters[i], each.fqns[i], saved, wanted);
    }
  }
  return wanted;
}

/// Adds to `wanted` the optimizer state of a parameter that a module updates in the backward. This
/// state is loaded into the module's own memory, which exists from the start.
void OptimizerLoad::want_fused(const registry::FusedParameter& parameter, const std::string& fqn,
                               const std::map<std::string, SavedTensor>& saved, StateDict& wanted) {
  const std::string prefix = "state." + fqn + ".";
  for (const auto& slot : parameter.slots) {
    StateTensor entry = slot.entry;
    entry.parameter = fqn;
    wanted.set(prefix + slot.name, std::move(entry));
  }
  if (parameter.step == nullptr) return;
  const std::string key = prefix + "step";
  StateTensor entry = StateTensor::whole(torch::zeros({}, scalar_type_of(dtype_in(saved, key))));
  entry.kind = formats::StateKind::scalar_parameter;
  entry.parameter = fqn;
  fused_steps_.emplace_back(key, Step{parameter.step, entry.local_shards.front().tensor});
  wanted.set(key, std::move(entry));
}

/// Returns the tensors of a parameter's current state, by name: `exp_avg`.
std::map<std::string, at::Tensor> OptimizerLoad::held_by(
    const OptimizerParameter& parameter) const {
  std::map<std::string, at::Tensor> held;
  const auto it = optimizer_->state().find(parameter.tensor.unsafeGetTensorImpl());
  if (it == optimizer_->state().end()) return held;
  const auto& options = optimizer_->param_groups()[parameter.group].options();
  for (const OptimizerAdapter::Slot& slot : adapter_->slots(*it->second, options)) {
    if (slot.tensor->defined()) held.emplace(slot.name, *slot.tensor);
  }
  return held;
}

OptimizerLoad::Loaded OptimizerLoad::want_of(const OptimizerParameter& parameter,
                                             const std::map<std::string, SavedTensor>& saved,
                                             StateDict& wanted) const {
  const std::string prefix = prefix_of(parameter);
  Loaded loaded;
  auto state = adapter_->make_state();
  const auto slots = adapter_->slots(*state, optimizer_->param_groups()[parameter.group].options());
  const auto is_saved = [&](const OptimizerAdapter::Slot& slot) {
    return saved.contains(prefix + slot.name);
  };
  const bool has_some = adapter_->makes_state_at_once() || saved.contains(prefix + "step") ||
                        std::ranges::any_of(slots, is_saved);
  if (!has_some) return loaded;
  const auto add = [&](const std::string& name, StateTensor entry) {
    entry.parameter = parameter.fqn;
    wanted.set(prefix + name, std::move(entry));
    loaded.wanted.push_back(prefix + name);
  };
  std::int64_t* const step = adapter_->step(*state);
  const auto is_going_to_be_read = [&](const std::string& name) {
    const auto it = saved.find(prefix + name);
    return it != saved.end() && it->second.is_read;
  };
  const bool is_replaced =
      (step == nullptr || is_going_to_be_read("step")) &&
      std::ranges::all_of(slots, [&](const OptimizerAdapter::Slot& slot) {
        return (!is_saved(slot) && !slot.is_required) || is_going_to_be_read(slot.name);
      });
  auto held = held_by(parameter);
  for (const OptimizerAdapter::Slot& slot : slots) {
    if (!is_saved(slot) && !slot.is_required) continue;
    at::Tensor& tensor = *slot.tensor = held[slot.name];
    // If there is no state yet, uses the dtype that the optimizer would choose.
    const at::ScalarType dtype = (tensor.defined() ? tensor : parameter.tensor).scalar_type();
    if (!is_replaced || !fits(tensor, parameter.tensor)) {
      tensor = torch::empty(parameter.tensor.sizes(),
                            parameter.tensor.options().requires_grad(false).dtype(dtype));
    }
    add(slot.name, laid_out_as(parameter, tensor));
    if (slot.may_begin_at_zero) loaded.may_be_absent.insert(prefix + slot.name);
  }
  if (step != nullptr) {
    StateTensor entry =
        StateTensor::whole(torch::zeros({}, scalar_type_of(dtype_in(saved, prefix + "step"))));
    entry.kind = formats::StateKind::scalar_parameter;
    loaded.steps.push_back({step, entry.local_shards.front().tensor});
    add("step", std::move(entry));
  }
  loaded.state = std::move(state);
  return loaded;
}

void OptimizerLoad::take_groups(const ValueTree& tree, const formats::KeyPath& root,
                                const NameSelection& only, LoadReport& report) {
  std::vector<OptimizerParameter> members = parameters_;
  const std::vector<OptimizerParameter> fused = fused_members();
  members.insert(members.end(), fused.begin(), fused.end());
  const std::vector<Value::Dict> saved = saved_groups(tree, root, members);
  take_fused_groups(fused, saved, report);
  if (saved.empty() && !only.selects_everything()) return;
  const auto fields = match_groups(parameters_, options_.size(), saved, report);
  const std::string state_prefix = (root.empty() ? "" : formats::spell(root) + ".") + "state.";
  for (std::size_t group = 0; group < options_.size(); ++group) {
    if (!fields[group]) continue;
    options_[group] =
        options_with(*adapter_, *fields[group], group, formats::spell(groups_path(root)));
    for (const std::string& fqn : members_of(*fields[group])) {
      if (only.selects(state_prefix + fqn + ".step")) known_.insert(fqn);
    }
  }
}

std::vector<OptimizerParameter> OptimizerLoad::fused_members() const {
  std::vector<OptimizerParameter> fused;
  for (std::size_t i = 0; i < fused_.size(); ++i) {
    for (const std::string& fqn : fused_[i].fqns) fused.push_back({i, {}, fqn, {}});
  }
  return fused;
}

std::vector<formats::Finding> OptimizerLoad::find_unused(
    const ValueTree& tree, const formats::KeyPath& root,
    const std::vector<formats::Finding>& problems) const {
  const std::string top = root.empty() ? "" : formats::spell(root) + ".";
  // Names that were reported, and each of these names without its last component.
  std::unordered_set<std::string> told;
  for (const formats::Finding& problem : problems) {
    if (problem.rule != "unexpected") continue;
    const std::string& fqn = problem.where.fqn;
    told.insert(fqn);
    told.insert(fqn.substr(0, fqn.rfind('.')));
  }
  std::vector<OptimizerParameter> members = parameters_;
  for (const OptimizerParameter& parameter : fused_members()) members.push_back(parameter);
  const auto is_known = [&](const std::string& name) { return names_in_model_.contains(name); };
  std::vector<formats::Finding> found;
  for (const UnusedValue& unused : unused_values(tree, root, members, is_known)) {
    const bool is_told =
        !unused.parameter.empty() && (told.contains("model." + unused.parameter) ||
                                      told.contains(top + "state." + unused.parameter));
    if (is_told) continue;
    found.push_back(
        {formats::Finding::Severity::error,
         "unexpected",
         {.fqn = unused.key},
         "nothing of that name",
         unused.parameter.empty() ? "a value" : "parameter '" + unused.parameter + "'"});
  }
  return found;
}

/// Loads the fields of groups whose parameters modules update. If the checkpoint has no such
/// groups, as torchrec's do not, the current fields stay.
void OptimizerLoad::take_fused_groups(const std::vector<OptimizerParameter>& fused,
                                      const std::vector<Value::Dict>& saved, LoadReport& report) {
  LoadStateDictOptions lenient = report.options;
  lenient.allow_missing = true;
  LoadReport own{lenient};
  auto fields = match_groups(fused, fused_.size(), saved, own);
  report.problems.insert(report.problems.end(), own.problems.begin(), own.problems.end());
  for (std::size_t i = 0; i < fused_.size(); ++i) {
    fused_[i].fields = std::move(fields[i]);
    if (!fused_[i].fields) continue;
    check_fields_of(*fused_[i].found.updates, *fused_[i].fields, fused_[i].fqns);
  }
}

void OptimizerLoad::take_step(const Step& step) {
  if (step.from.scalar_type() == at::kLong) {
    *step.to = step.from.item<std::int64_t>();
  } else {
    *step.to = static_cast<std::int64_t>(step.from.to(at::kDouble).item<double>());
  }
}

/// Throws if a loaded step is not a valid number of steps.
void OptimizerLoad::check_step(const std::string& key, const Step& step) {
  const double number = step.from.to(at::kDouble).item<double>();
  constexpr double kMost = 9e18;
  if (number >= 0 && number <= kMost && number == std::floor(number)) return;
  throw Error::expected(ErrorKind::mismatch, {.fqn = key}, "step of an optimizer",
                        "a whole number of 0 or more", value_to_string(Value(number)));
}

void OptimizerLoad::check_steps(const std::set<std::string>& filled) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::string key = prefix_of(parameters_[i]) + "step";
    if (!filled.contains(key)) continue;
    for (const Step& step : loaded_[i].steps) check_step(key, step);
  }
  for (const auto& [key, step] : fused_steps_) {
    if (filled.contains(key)) check_step(key, step);
  }
}

/// Returns whether everything was loaded that the optimizer's next step needs.
bool OptimizerLoad::is_complete(const Loaded& loaded, const std::set<std::string>& filled) {
  return std::ranges::all_of(loaded.wanted, [&](const std::string& name) {
    return filled.contains(name) || loaded.may_be_absent.contains(name);
  });
}

std::vector<std::string> OptimizerLoad::find_incomplete(const std::set<std::string>& filled) const {
  std::vector<std::string> found;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto is_filled = [&](const std::string& name) { return filled.contains(name); };
    const bool has_some = std::ranges::any_of(loaded_[i].wanted, is_filled);
    if (has_some && !is_complete(loaded_[i], filled)) {
      found.push_back("state." + parameters_[i].fqn);
    }
  }
  return found;
}

/// Sets the new state that was not loaded, and that may begin at zero, to the parameter's present
/// state. Without present state, makes it zeros if the next step needs it, else leaves it out.
void OptimizerLoad::keep_absent(const OptimizerParameter& parameter, const Loaded& loaded,
                                const std::set<std::string>& filled) const {
  const auto held = held_by(parameter);
  const auto& options = optimizer_->param_groups()[parameter.group].options();
  for (const OptimizerAdapter::Slot& slot : adapter_->slots(*loaded.state, options)) {
    const std::string key = prefix_of(parameter) + slot.name;
    if (!loaded.may_be_absent.contains(key) || filled.contains(key)) continue;
    const auto present = held.find(slot.name);
    if (present != held.end()) {
      *slot.tensor = present->second;
    } else if (slot.is_required) {
      slot.tensor->zero_();
    } else {
      *slot.tensor = at::Tensor();
    }
  }
}

void OptimizerLoad::replace(const std::set<std::string>& filled) {
  for (std::size_t group = 0; group < options_.size(); ++group) {
    if (options_[group]) optimizer_->param_groups()[group].set_options(std::move(options_[group]));
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    void* const key = parameters_[i].tensor.unsafeGetTensorImpl();
    Loaded& loaded = loaded_[i];
    if (!loaded.state) {
      if (known_.contains(parameters_[i].fqn)) optimizer_->state().erase(key);
      continue;
    }
    if (!is_complete(loaded, filled)) continue;
    keep_absent(parameters_[i], loaded, filled);
    for (const Step& step : loaded.steps) take_step(step);
    optimizer_->state()[key] = std::move(loaded.state);
  }
  for (const Fused& each : fused_) {
    if (each.fields) each.found.updates->set_fields(*each.fields);
  }
  for (const auto& [key, step] : fused_steps_) {
    if (filled.contains(key)) take_step(step);
  }
}

}  // namespace tessera::state
