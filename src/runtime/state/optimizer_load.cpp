#include "runtime/state/optimizer_load.h"

#include <torch/types.h>

#include <algorithm>

#include "runtime/state/optimizer_groups.h"
#include "runtime/torch_bridge.h"

namespace tessera::state {
namespace {

std::string prefix_of(const OptimizerParameter& parameter) {
  return "state." + parameter.fqn + ".";
}

/// Returns the dtype that was saved under a name, or one for what was not.
DType dtype_in(const std::map<std::string, DType>& saved, const std::string& name) {
  const auto it = saved.find(name);
  return it == saved.end() ? DType::float32 : it->second;
}

}  // namespace

OptimizerLoad::OptimizerLoad(torch::nn::Module& model, torch::optim::Optimizer& optimizer)
    : optimizer_(optimizer),
      adapter_(OptimizerAdapter::of(optimizer)),
      parameters_(parameters_of(model, optimizer)) {
  options_.resize(optimizer.param_groups().size());
}

StateDict OptimizerLoad::want(const std::map<std::string, DType>& saved) {
  StateDict wanted;
  for (const OptimizerParameter& parameter : parameters_) {
    loaded_.push_back(want_of(parameter, saved, wanted));
  }
  return wanted;
}

torch::optim::OptimizerParamState* OptimizerLoad::present_state(
    const OptimizerParameter& parameter) const {
  const auto it = optimizer_.state().find(parameter.tensor.unsafeGetTensorImpl());
  return it == optimizer_.state().end() ? nullptr : it->second.get();
}

/// Returns where a slot is loaded to: what the optimizer has, where it fits, so that a load takes
/// no memory beside the state itself.
at::Tensor OptimizerLoad::memory_for(const std::string& slot_name, at::ScalarType dtype,
                                     const OptimizerParameter& parameter,
                                     torch::optim::OptimizerParamState* present) const {
  if (present != nullptr) {
    const auto& options = optimizer_.param_groups()[parameter.group].options();
    for (const OptimizerAdapter::Slot& slot : adapter_.slots(*present, options)) {
      const at::Tensor& tensor = *slot.tensor;
      if (slot.name == slot_name && tensor.defined() && tensor.scalar_type() == dtype &&
          tensor.sizes() == parameter.tensor.sizes() && tensor.is_contiguous()) {
        return tensor;
      }
    }
  }
  return torch::empty(parameter.tensor.sizes(),
                      parameter.tensor.options().requires_grad(false).dtype(dtype));
}

OptimizerLoad::Loaded OptimizerLoad::want_of(const OptimizerParameter& parameter,
                                             const std::map<std::string, DType>& saved,
                                             StateDict& wanted) const {
  const std::string prefix = prefix_of(parameter);
  Loaded loaded;
  auto state = adapter_.make_state();
  const auto slots = adapter_.slots(*state, optimizer_.param_groups()[parameter.group].options());
  const auto is_saved = [&](const OptimizerAdapter::Slot& slot) {
    return saved.contains(prefix + slot.name);
  };
  const bool has_some = adapter_.makes_state_at_once() || saved.contains(prefix + "step") ||
                        std::ranges::any_of(slots, is_saved);
  if (!has_some) return loaded;
  const auto add = [&](const std::string& name, StateTensor entry) {
    entry.parameter = parameter.fqn;
    wanted.set(prefix + name, std::move(entry));
    loaded.wanted.push_back(prefix + name);
  };
  // A parameter's state is loaded as one: where some of it is not there, what is present stays.
  const bool is_complete = std::ranges::all_of(
      slots, [&](const auto& slot) { return is_saved(slot) || !slot.is_required; });
  auto* const present = is_complete ? present_state(parameter) : nullptr;
  for (const OptimizerAdapter::Slot& slot : slots) {
    if (!is_saved(slot) && !slot.is_required) continue;
    const at::ScalarType dtype = scalar_type_of(dtype_in(saved, prefix + slot.name));
    *slot.tensor = memory_for(slot.name, dtype, parameter, present);
    add(slot.name, laid_out_as(parameter, *slot.tensor));
  }
  if (std::int64_t* const step = adapter_.step(*state)) {
    StateTensor entry =
        StateTensor::whole(torch::zeros({}, scalar_type_of(dtype_in(saved, prefix + "step"))));
    entry.kind = formats::StateKind::scalar_parameter;
    loaded.steps.push_back({step, present == nullptr ? nullptr : adapter_.step(*present),
                            entry.parts.front().tensor, prefix + "step"});
    add("step", std::move(entry));
  }
  loaded.state = std::move(state);
  return loaded;
}

void OptimizerLoad::take_groups(const ValueTree& tree, const formats::KeyPath& root,
                                const NameSelection& only, LoadReport& report) {
  const std::vector<Value::Dict> saved = saved_groups(tree, root, parameters_);
  if (saved.empty() && !only.selects_everything()) return;
  const auto fields = match_groups(parameters_, options_.size(), saved, report);
  for (std::size_t group = 0; group < fields.size(); ++group) {
    if (!fields[group]) continue;
    options_[group] = adapter_.with_fields(*fields[group]);
    for (const OptimizerParameter& parameter : parameters_) {
      if (parameter.group == group) known_.insert(parameter.fqn);
    }
  }
}

void OptimizerLoad::replace(const std::set<std::string>& filled) {
  for (std::size_t group = 0; group < options_.size(); ++group) {
    if (options_[group]) optimizer_.param_groups()[group].set_options(std::move(options_[group]));
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    void* const key = parameters_[i].tensor.unsafeGetTensorImpl();
    Loaded& loaded = loaded_[i];
    if (!loaded.state) {
      if (known_.contains(parameters_[i].fqn)) optimizer_.state().erase(key);
      continue;
    }
    const bool is_whole = std::ranges::all_of(
        loaded.wanted, [&](const std::string& name) { return filled.contains(name); });
    for (const Step& step : loaded.steps) {
      std::int64_t* const to = is_whole ? step.to : step.present;
      if (to == nullptr || !filled.contains(step.name)) continue;
      *to = static_cast<std::int64_t>(step.from.to(at::kDouble).item<double>());
    }
    if (is_whole) optimizer_.state()[key] = std::move(loaded.state);
  }
}

}  // namespace tessera::state
