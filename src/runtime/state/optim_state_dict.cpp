#include "tessera/runtime/state/optim_state_dict.h"

#include <torch/types.h>

#include <map>
#include <unordered_set>

#include "runtime/registry/state_parts.h"
#include "runtime/state/load_problems.h"
#include "runtime/state/optimizer_adapters.h"
#include "runtime/state/optimizer_groups.h"
#include "runtime/state/optimizer_parameters.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using state::OptimizerAdapter;
using state::OptimizerParameter;
using torch::nn::Module;
using torch::optim::Optimizer;

std::string group_prefix(std::size_t group) {
  return "param_groups." + std::to_string(group) + ".";
}

/// Returns the fields of a group in a state dict, without the group's prefix.
Value::Dict fields_of_group(const StateDict& state_dict, std::size_t group) {
  const std::string prefix = group_prefix(group);
  Value::Dict fields;
  for (const StateDict::Item& item : state_dict) {
    if (!item.fqn.starts_with(prefix)) continue;
    if (const auto* value = std::get_if<Value>(&item.entry)) {
      fields.emplace_back(item.fqn.substr(prefix.size()), *value);
    }
  }
  return fields;
}

/// Loads in two steps: everything is found and checked, then everything is replaced.
class OptimizerLoad {
 public:
  OptimizerLoad(Module& model, Optimizer& optimizer, const StateDict& source,
                const LoadStateDictOptions& options)
      : optimizer_(optimizer),
        adapter_(OptimizerAdapter::of(optimizer)),
        source_(source),
        report_{options},
        parameters_(state::parameters_of(model, optimizer)) {}

  void check() {
    match_groups();
    for (const OptimizerParameter& parameter : parameters_) load_state(parameter);
    if (!report_.options.allow_unexpected) {
      for (const StateDict::Item& item : source_) {
        if (item.fqn.starts_with("state.") && !taken_.contains(item.fqn)) {
          report_.add("unexpected", item.fqn, "no such key", "one");
        }
      }
    }
    state::refuse_problems("optimizer state dict", report_.problems);
  }

  void replace() {
    for (std::size_t i = 0; i < options_.size(); ++i) {
      if (options_[i]) optimizer_.param_groups()[i].set_options(std::move(options_[i]));
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      void* const key = parameters_[i].tensor.unsafeGetTensorImpl();
      optimizer_.state().erase(key);
      if (states_[i]) optimizer_.state()[key] = std::move(states_[i]);
    }
  }

 private:
  /// Finds, for each group, the one in the state dict that has its parameters.
  void match_groups() {
    std::vector<Value::Dict> saved;
    for (Value::Dict next = fields_of_group(source_, 0); !next.empty();
         next = fields_of_group(source_, saved.size())) {
      saved.push_back(std::move(next));
    }
    const auto fields =
        state::match_groups(parameters_, optimizer_.param_groups().size(), saved, report_);
    for (const auto& of_group : fields) {
      options_.push_back(of_group ? adapter_.with_fields(*of_group) : nullptr);
    }
  }

  void load_state(const OptimizerParameter& parameter) {
    const std::string prefix = "state." + parameter.fqn + ".";
    const auto& options = options_[parameter.group]
                              ? *options_[parameter.group]
                              : optimizer_.param_groups()[parameter.group].options();
    auto loaded = adapter_.make_state();
    bool has_some = false;
    StateDict own;  // find_fitting wants one that it may change
    const auto take = [&](const std::string& name) {
      const std::string fqn = prefix + name;
      const StateEntry* const entry = source_.find(fqn);
      if (entry == nullptr) return false;
      taken_.insert(fqn);
      own.set(fqn, *entry);
      has_some = true;
      return true;
    };
    std::vector<std::string> missing;
    for (const OptimizerAdapter::Slot& slot : adapter_.slots(*loaded, options)) {
      if (take(slot.name)) {
        load_slot(parameter, prefix + slot.name, own, *slot.tensor);
      } else if (slot.is_required) {
        missing.push_back(prefix + slot.name);
      }
    }
    if (std::int64_t* const step = adapter_.step(*loaded)) {
      if (take("step")) {
        load_step(prefix + "step", own, *step);
      } else {
        missing.push_back(prefix + "step");
      }
    }
    if (!report_.options.allow_missing && (has_some || adapter_.makes_state_at_once())) {
      for (const std::string& fqn : missing) report_.add("missing", fqn, "a tensor", "none");
    }
    states_.push_back(has_some && missing.empty() ? std::move(loaded) : nullptr);
  }

  void load_slot(const OptimizerParameter& parameter, const std::string& fqn, StateDict& own,
                 at::Tensor& slot) {
    // Its dtype is its own: an optimizer may keep state in another one than the parameter's.
    const auto* entry = std::get_if<StateTensor>(own.find(fqn));
    const DType dtype = entry == nullptr ? DType::float32 : entry->dtype;
    const StateTensor* const found = find_fitting(own, fqn, dtype, parameter.layout.shape, report_);
    if (found == nullptr) return;
    slot =
        torch::empty(parameter.tensor.sizes(),
                     parameter.tensor.options().requires_grad(false).dtype(scalar_type_of(dtype)));
    std::int64_t begin = 0;
    for (const TensorPart& part : parameter.layout.parts) {
      const auto cut = state::cut(*found, part.region);
      if (!cut) {
        report_.add("hole", fqn, region_to_string(part.region), "parts that do not hold all of it");
        return;
      }
      slot.view({-1}).narrow(0, begin, cut->numel()).copy_(*cut);
      begin += cut->numel();
    }
  }

  void load_step(const std::string& fqn, StateDict& own, std::int64_t& step) {
    const auto* const entry = std::get_if<StateTensor>(own.find(fqn));
    if (entry == nullptr || !entry->is_whole() || numel_of(entry->shape) != 1) {
      report_.add("shape", fqn, "one number", "another entry");
      return;
    }
    step = static_cast<std::int64_t>(entry->tensor(fqn).to(at::kDouble).item<double>());
  }

  Optimizer& optimizer_;
  const OptimizerAdapter& adapter_;
  const StateDict& source_;
  LoadReport report_;
  std::vector<OptimizerParameter> parameters_;
  std::unordered_set<std::string> taken_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;    // by group
  std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> states_;  // by parameter
};

/// Returns the names, by number, in the order of the groups.
std::vector<std::string> numbered_names(const Module& model, const Optimizer& optimizer) {
  std::vector<std::string> numbered;
  for (const auto& group : state::parameter_names(model, optimizer)) {
    numbered.insert(numbered.end(), group.begin(), group.end());
  }
  return numbered;
}

}  // namespace

StateDict optim_state_dict(Module& model, const Optimizer& optimizer,
                           const StateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const OptimizerAdapter& adapter = OptimizerAdapter::of(optimizer);
  const dist::Mesh mesh = mesh_of(model);
  const bool keeps = !options.rank0_only || mesh.rank() == 0;
  StateDict result;
  const auto add = [&](const OptimizerParameter& parameter, const std::string& name,
                       StateTensor entry) {
    const std::string fqn = "state." + parameter.fqn + "." + name;
    if (options.type == FULL) {
      entry = state::gather(entry, *mesh.world(), keeps, options.offload_to_cpu, fqn);
    } else if (options.offload_to_cpu) {
      for (TensorPart& part : entry.parts) part.tensor = part.tensor.to(at::kCPU);
    }
    if (options.type == LOCAL) entry.layout.clear();
    if (keeps) result.set(fqn, std::move(entry), {"state", parameter.fqn, name});
  };
  const auto parameters = state::parameters_of(model, optimizer);
  for (const OptimizerParameter& parameter : parameters) {
    const auto it = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
    if (it == optimizer.state().end()) continue;
    const auto& group_options = optimizer.param_groups()[parameter.group].options();
    for (const auto& slot : adapter.slots(*it->second, group_options)) {
      if (slot.tensor->defined()) {
        add(parameter, slot.name, state::laid_out_as(parameter, *slot.tensor));
      }
    }
    if (const std::int64_t* const step = adapter.step(*it->second)) {
      StateTensor entry = StateTensor::whole(state::step_tensor(*step));
      entry.kind = formats::StateKind::scalar_parameter;
      entry.parameter = parameter.fqn;
      add(parameter, "step", std::move(entry));
    }
  }
  if (!keeps) return result;
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    Value::Dict fields = adapter.fields(optimizer.param_groups()[group].options());
    Value::List names;
    for (const OptimizerParameter& parameter : parameters) {
      if (parameter.group == group) names.emplace_back(parameter.fqn);
    }
    fields.emplace_back("params", std::move(names));
    for (auto& [key, value] : fields) {
      const std::string& name = *key.get_if<std::string>();
      result.set(group_prefix(group) + name, std::move(value),
                 {"param_groups", static_cast<std::int64_t>(group), name});
    }
  }
  return result;
}

void load_optim_state_dict(Module& model, Optimizer& optimizer, const StateDict& state_dict,
                           const LoadStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  OptimizerLoad load(model, optimizer, state_dict, options);
  load.check();
  load.replace();
}

StateDict rekey_optim_state_dict(const StateDict& state_dict, OptimStateKey key,
                                 const Module& model, const Optimizer& optimizer) {
  const std::vector<std::string> names = numbered_names(model, optimizer);
  // Longest first: `a.b` may be a parameter beside `a`.
  std::map<std::string, std::string, std::greater<>> renamed;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string id = std::to_string(i);
    key == OptimStateKey::param_id ? renamed.emplace(names[i], id) : renamed.emplace(id, names[i]);
  }
  const auto new_name = [&](const std::string& name) -> const std::string& {
    const auto it = renamed.find(name);
    if (it != renamed.end()) return it->second;
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = name}, "key of optimizer state",
        key == OptimStateKey::param_id ? "a parameter's name" : "a parameter's number",
        "another one");
  };
  StateDict result;
  for (const StateDict::Item& item : state_dict) {
    if (item.fqn.starts_with("state.")) {
      const std::size_t dot = item.fqn.rfind('.');
      const std::string name = item.fqn.substr(dot + 1);
      const std::string& renamed_to = new_name(item.fqn.substr(6, dot - 6));
      formats::KeyPath path = {"state", renamed_to, name};
      if (key == OptimStateKey::param_id)
        path[1] = static_cast<std::int64_t>(std::stoll(renamed_to));
      result.set("state." + renamed_to + "." + name, item.entry, std::move(path));
      continue;
    }
    StateEntry entry = item.entry;
    if (item.fqn.ends_with(".params")) {
      if (auto* value = std::get_if<Value>(&entry); value && value->is<Value::List>()) {
        for (Value& each : *value->get_if<Value::List>()) {
          if (key == OptimStateKey::param_id) {
            const auto* name = each.get_if<std::string>();
            each = static_cast<std::int64_t>(std::stoll(new_name(name ? *name : "")));
          } else {
            const auto* number = each.get_if<std::int64_t>();
            each = new_name(number ? std::to_string(*number) : "");
          }
        }
      }
    }
    result.set(item.fqn, std::move(entry), item.key_path);
  }
  return result;
}

}  // namespace tessera
