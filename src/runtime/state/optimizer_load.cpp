#include "runtime/state/optimizer_load.h"

#include <torch/types.h>

#include <algorithm>

#include "runtime/state/optimizer_groups.h"
#include "runtime/torch_bridge.h"

namespace tessera::state {
namespace {

std::string prefix_of(const OptimizerParameter& parameter) {
  return "optim.state." + parameter.fqn + ".";
}

/// Returns the dtype that a checkpoint has under a name, or one for what it lacks.
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

void OptimizerLoad::want(const std::map<std::string, DType>& saved, StateDict& wanted) {
  for (const OptimizerParameter& parameter : parameters_) {
    loaded_.push_back(want_of(parameter, saved, wanted));
  }
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
    entry.parameter = "model." + parameter.fqn;
    wanted.set(prefix + name, std::move(entry));
    loaded.wanted.push_back(prefix + name);
  };
  for (const OptimizerAdapter::Slot& slot : slots) {
    if (!is_saved(slot) && !slot.is_required) continue;
    const at::ScalarType dtype = scalar_type_of(dtype_in(saved, prefix + slot.name));
    *slot.tensor = torch::empty(parameter.tensor.sizes(),
                                parameter.tensor.options().requires_grad(false).dtype(dtype));
    add(slot.name, laid_out_as(parameter, *slot.tensor));
  }
  if (std::int64_t* const step = adapter_.step(*state)) {
    StateTensor entry =
        StateTensor::whole(torch::zeros({}, scalar_type_of(dtype_in(saved, prefix + "step"))));
    entry.kind = formats::StateKind::scalar_parameter;
    loaded.steps.push_back({step, entry.parts.front().tensor});
    add("step", std::move(entry));
  }
  loaded.state = std::move(state);
  return loaded;
}

void OptimizerLoad::take_groups(const std::vector<Value::Dict>& saved, const NameSelection& only,
                                bool allow_missing, std::vector<formats::Finding>& problems) {
  if (saved.empty() && !only.selects_everything()) return;
  const LoadStateDictOptions relaxed{.allow_missing = allow_missing};
  LoadReport report{relaxed};
  const auto fields = match_groups(parameters_, options_.size(), saved, report);
  problems.insert(problems.end(), report.problems.begin(), report.problems.end());
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
    if (!is_whole) continue;
    for (const Step& step : loaded.steps) {
      *step.to = static_cast<std::int64_t>(step.from.to(at::kDouble).item<double>());
    }
    optimizer_.state()[key] = std::move(loaded.state);
  }
}

}  // namespace tessera::state
