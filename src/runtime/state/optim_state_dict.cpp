#include "tessera/runtime/state/optim_state_dict.h"

#include <torch/types.h>

#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/json.h"
#include "runtime/registry/parameter_shards.h"
#include "runtime/registry/state_tensor_conversion.h"
#include "runtime/state/broadcast_text.h"
#include "runtime/state/load_hints.h"
#include "runtime/state/load_problems.h"
#include "runtime/state/optimizer_adapters.h"
#include "runtime/state/optimizer_load.h"
#include "runtime/state/optimizer_parameters.h"
#include "runtime/state/value_tree.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera {
namespace {

using formats::KeyPath;
using state::OptimizerAdapter;
using state::OptimizerLoad;
using state::OptimizerParameter;
using state::SavedTensor;
using state::ValueTree;
using torch::nn::Module;
using torch::optim::Optimizer;

std::string group_prefix(std::size_t group) {
  return "param_groups." + std::to_string(group) + ".";
}

/// The names and dtypes of a state dict's tensors, and its values: a state dict without tensor
/// elements.
struct Catalogue {
  std::map<std::string, SavedTensor> tensors;
  ValueTree values;
};

Catalogue catalogue_of(const StateDict& state_dict) {
  Catalogue catalogue;
  for (const StateDict::Item& item : state_dict) {
    if (const auto* tensor = std::get_if<StateTensor>(&item.entry)) {
      catalogue.tensors.emplace(item.fqn, SavedTensor{tensor->dtype});
    } else if (const auto* value = std::get_if<Value>(&item.entry)) {
      catalogue.values.add_renamed(item.fqn, item.key_path, *value);
    }
  }
  return catalogue;
}

/// Returns rank 0's catalogue on all ranks.
Catalogue broadcast(const Catalogue& catalogue, dist::Group& world) {
  Value::List tensors;
  for (const auto& [fqn, saved] : catalogue.tensors) {
    tensors.push_back(Value::List{fqn, std::string(dtype_name(saved.dtype))});
  }
  Value::List values;
  for (const auto& [name, leaf] : catalogue.values.leaves()) {
    values.push_back(Value::List{formats::key_path_to_value(leaf.path), leaf.value});
  }
  const std::string what = "rank 0's state dict";
  const std::string text = state::broadcast_text(
      value_to_json(Value::List{std::move(tensors), std::move(values)}), world);
  const Value received = value_from_json(parse_json(text, what), what);
  const auto& lists = *received.get_if<Value::List>();
  Catalogue result;
  for (const Value& each : *lists[0].get_if<Value::List>()) {
    const auto& tensor = *each.get_if<Value::List>();
    result.tensors.emplace(*tensor[0].get_if<std::string>(),
                           SavedTensor{*parse_dtype(*tensor[1].get_if<std::string>())});
  }
  for (const Value& each : *lists[1].get_if<Value::List>()) {
    const auto& leaf = *each.get_if<Value::List>();
    result.values.add_leaf(*formats::key_path_from_value(leaf[0]), leaf[1]);
  }
  return result;
}

/// Finds the wanted tensors in a state dict. Reports missing, unfit, incomplete, unexpected ones.
std::unordered_map<std::string, const StateTensor*> find_all(StateDict& source,
                                                             const StateDict& wanted,
                                                             LoadReport& report) {
  std::unordered_map<std::string, const StateTensor*> found;
  for (const StateDict::Item& item : wanted) {
    const auto& own = std::get<StateTensor>(item.entry);
    const StateTensor* entry = find_fitting(source, item.fqn, own.dtype, own.shape, report);
    if (entry == nullptr) continue;
    found.emplace(item.fqn, entry);
    // With rank0_only, rank 0 must have whole tensors, which it sends to the other ranks.
    const std::vector<LocalShard> whole = {{whole_box(own.shape), {}}};
    for (const LocalShard& local : report.options.rank0_only ? whole : own.local_shards) {
      if (state::cut(*entry, local.region)) continue;
      report.add("hole", item.fqn, region_to_string(local.region), "shards that do not cover it");
      break;
    }
  }
  if (report.options.allow_unexpected) return found;
  for (const StateDict::Item& item : source) {
    if (item.fqn.starts_with("state.") && !wanted.contains(item.fqn)) {
      state::add_unexpected(item, report);
    }
  }
  return found;
}

/// Throws if there are problems.
void refuse(const LoadReport& report, std::vector<std::string> hints) {
  if (reshard::has_state_by_number(report.problems, "state.")) {
    hints.emplace_back(
        "rekey_optim_state_dict(…, OptimStateKey::param_name, …) converts numbers to names");
  }
  state::refuse_problems("optimizer state dict", report.problems, hints,
                         state::kStateDictOfOptimizer);
}

/// Returns the parameters' names in the order of the groups.
std::vector<std::string> numbered_names(const Module& model, const Optimizer& optimizer) {
  std::vector<std::string> numbered;
  // State dict hooks need a non-const module; the walk itself changes nothing.
  for (const auto& group : state::parameter_names(const_cast<Module&>(model), optimizer)) {
    numbered.insert(numbered.end(), group.begin(), group.end());
  }
  return numbered;
}

}  // namespace

namespace {

/// Creates an optimizer state dict. Collective.
class OptimizerWalk {
 public:
  OptimizerWalk(Module& model, const StateDictOptions& options)
      : model_(model),
        options_(options),
        mesh_(mesh_of(model)),
        keeps_(!options.rank0_only || mesh_.rank() == 0) {}

  void take(const Optimizer& optimizer);
  void take_fused();
  StateDict result() { return std::move(result_); }

 private:
  void add(const std::string& parameter, const std::string& name, StateTensor entry) {
    const std::string fqn = "state." + parameter + "." + name;
    entry.parameter = parameter;
    entry = state::as_asked(std::move(entry), *mesh_.world(), options_, fqn);
    if (keeps_) result_.set(fqn, std::move(entry), {"state", parameter, name});
  }
  void add_step(const std::string& parameter, std::int64_t step, std::vector<Shard> layout = {}) {
    StateTensor entry = StateTensor::whole(state::step_tensor(step));
    entry.layout = std::move(layout);
    entry.kind = formats::StateKind::scalar_parameter;
    add(parameter, "step", std::move(entry));
  }
  void add_group(Value::Dict fields, Value::List names) {
    const std::size_t group = num_groups_++;
    if (!keeps_) return;
    fields.emplace_back("params", std::move(names));
    for (auto& [key, value] : fields) {
      const std::string& name = *key.get_if<std::string>();
      result_.set(group_prefix(group) + name, std::move(value),
                  {"param_groups", static_cast<std::int64_t>(group), name});
    }
  }

  Module& model_;
  const StateDictOptions& options_;
  dist::Mesh mesh_;
  bool keeps_;
  std::size_t num_groups_ = 0;
  StateDict result_;
};

void OptimizerWalk::take(const Optimizer& optimizer) {
  const OptimizerAdapter& adapter = OptimizerAdapter::of(optimizer);
  auto parameters = state::parameters_of(model_, optimizer);
  for (OptimizerParameter& parameter : parameters) {
    const auto it = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
    if (it == optimizer.state().end()) continue;
    // If each rank has its own copy of a parameter, rank 0's is saved, with its state. FULL has
    // this rank's copy of both, without a message: other ranks may have no state of the parameter.
    const StateTensor& own = parameter.layout;
    const bool is_own_copy = own.layout == state::layout_of_own_copies(own.shape) &&
                             !registry::find_shard(parameter.tensor);
    if (is_own_copy && options_.type == FULL) parameter.layout.layout.clear();
    const auto& group_options = optimizer.param_groups()[parameter.group].options();
    for (const auto& slot : adapter.slots(*it->second, group_options)) {
      if (slot.tensor->defined()) {
        add(parameter.fqn, slot.name, state::laid_out_as(parameter, *slot.tensor));
      }
    }
    if (const std::int64_t* const step = adapter.step(*it->second)) {
      add_step(parameter.fqn, *step,
               is_own_copy && options_.type != FULL ? state::layout_of_own_copies({})
                                                    : std::vector<Shard>());
    }
  }
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    Value::List names;
    for (const OptimizerParameter& parameter : parameters) {
      if (parameter.group == group) names.emplace_back(parameter.fqn);
    }
    add_group(adapter.fields(optimizer.param_groups()[group].options()), std::move(names));
  }
}

/// Adds the state of parameters that modules update in the backward, with one parameter group per
/// module.
void OptimizerWalk::take_fused() {
  const auto all = registry::find_fused_updates(model_);
  if (all.empty()) return;
  const state::ParameterKeys keys(model_);
  for (const auto& found : all) {
    Value::List names;
    for (const auto& parameter : found.updates->parameters()) {
      const std::string fqn = keys.of(found.prefix + parameter.name);
      for (const auto& slot : parameter.slots) add(fqn, slot.name, slot.entry);
      if (parameter.step != nullptr) add_step(fqn, *parameter.step);
      names.emplace_back(fqn);
    }
    add_group(found.updates->fields(), std::move(names));
  }
}

}  // namespace

StateDict optim_state_dict(Module& model, const Optimizer& optimizer,
                           const StateDictOptions& options) {
  const at::NoGradGuard no_grad;
  OptimizerWalk walk(model, options);
  walk.take(optimizer);
  walk.take_fused();
  return walk.result();
}

StateDict optim_state_dict(Module& model, const StateDictOptions& options) {
  const at::NoGradGuard no_grad;
  OptimizerWalk walk(model, options);
  walk.take_fused();
  return walk.result();
}

namespace {

void load_state(Module& model, Optimizer* optimizer, const StateDict& state_dict,
                const LoadStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const dist::Mesh mesh = mesh_of(model);
  dist::Group* const from_first = options.rank0_only ? mesh.world().get() : nullptr;
  Catalogue catalogue = catalogue_of(state_dict);
  if (from_first != nullptr) catalogue = broadcast(catalogue, *from_first);

  std::optional<OptimizerLoad> load;
  StateDict wanted;
  StateDict source = state_dict;  // find_fitting needs a non-const state dict
  std::unordered_map<std::string, const StateTensor*> found;
  const auto check = [&] {
    load.emplace(model, optimizer);
    wanted = load->want(catalogue.tensors);
    LoadReport report{options};
    load->take_groups(catalogue.values, {}, NameSelection(), report);
    if (from_first == nullptr || mesh.rank() == 0) found = find_all(source, wanted, report);
    if (!options.allow_unexpected) {
      const auto unused = load->find_unused(catalogue.values, {}, report.problems);
      report.problems.insert(report.problems.end(), unused.begin(), unused.end());
    }
    refuse(report, state::hints_for_state_dict(state_dict, model, options));
  };
  if (from_first == nullptr) {
    check();
  } else {
    state::check_on_all_ranks(*from_first, check);
  }

  std::set<std::string> filled;
  const auto fill = [&](const StateDict::Item& item) {
    if (!catalogue.tensors.contains(item.fqn)) return;  // the state dict does not have it
    const auto& own = std::get<StateTensor>(item.entry);
    const auto it = found.find(item.fqn);
    if (from_first != nullptr) {
      state::scatter(it == found.end() ? nullptr : it->second, own, *from_first, item.fqn);
    } else {
      for (const LocalShard& local : own.local_shards) {
        local.tensor.view({-1}).copy_(*state::cut(*it->second, local.region));
      }
    }
    filled.insert(item.fqn);
  };
  // The steps first, into memory of their own: the other tensors may be the optimizer's own.
  const auto is_step = [](const StateDict::Item& item) {
    return std::get<StateTensor>(item.entry).kind == formats::StateKind::scalar_parameter;
  };
  for (const StateDict::Item& item : wanted) {
    if (is_step(item)) fill(item);
  }
  load->check_steps(filled);
  for (const StateDict::Item& item : wanted) {
    if (!is_step(item)) fill(item);
  }
  load->replace(filled);
}

}  // namespace

void load_optim_state_dict(Module& model, Optimizer& optimizer, const StateDict& state_dict,
                           const LoadStateDictOptions& options) {
  load_state(model, &optimizer, state_dict, options);
}

void load_optim_state_dict(Module& model, const StateDict& state_dict,
                           const LoadStateDictOptions& options) {
  load_state(model, nullptr, state_dict, options);
}

StateDict flatten_optim_state_dict(const StateDict& state_dict) {
  StateDict result;
  result.units = state_dict.units;
  std::map<std::string, std::vector<StateDict::Item>> groups;  // the fields of each group
  for (const StateDict::Item& item : state_dict) {
    if (!item.fqn.starts_with("param_groups.")) {
      result.set(item.fqn, item.entry, KeyPath{item.fqn});
      continue;
    }
    groups[item.fqn.substr(0, item.fqn.find('.', std::strlen("param_groups.")))].push_back(item);
  }
  for (const auto& [group, fields] : groups) {
    const StateEntry* const params = state_dict.find(group + ".params");
    const auto* const value = params == nullptr ? nullptr : std::get_if<Value>(params);
    const auto* const names = value == nullptr ? nullptr : value->get_if<Value::List>();
    if (names == nullptr) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = group + ".params"},
                            "parameters of a group", "a list of names",
                            params == nullptr ? "none" : "an entry that is not a list");
    }
    if (names->empty()) {
      TORCH_WARN("flatten_optim_state_dict: ", group,
                 " has no parameters, so the flattened state dict lacks its fields");
    }
    for (const Value& each : *names) {
      const auto* const name = each.get_if<std::string>();
      if (name == nullptr) {
        throw Error::expected(ErrorKind::invalid_argument, {.fqn = group + ".params"},
                              "key of a parameter", "the parameter's name", "a number",
                              "rekey_optim_state_dict converts numbers to names");
      }
      for (const StateDict::Item& field : fields) {
        if (field.fqn == group + ".params") continue;
        const std::string fqn = "param_groups." + *name + field.fqn.substr(group.size());
        result.set(fqn, field.entry, KeyPath{fqn});
      }
    }
  }
  return result;
}

namespace {

/// Says whether `key` is `param_groups.<number>.<field>`, and the group has `params`: the flattened
/// form has names of parameters in place of numbers.
bool is_in_numbered_group(const std::string& key, const StateDict& state_dict) {
  const std::size_t begin = std::strlen("param_groups.");
  const std::string number = key.substr(begin, key.find('.', begin) - begin);
  return !number.empty() && number.find_first_not_of("0123456789") == std::string::npos &&
         state_dict.contains("param_groups." + number + ".params");
}

}  // namespace

StateDict rekey_optim_state_dict(const StateDict& state_dict, OptimStateKey key,
                                 const Module& model, const Optimizer& optimizer) {
  const std::vector<std::string> names = numbered_names(model, optimizer);
  // From old key to new key. Only equal keys match, so the order of the map has no effect.
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
        key == OptimStateKey::param_id ? "the name of a parameter" : "the number of a parameter",
        "a key that no parameter has", "is the state dict already converted?");
  };
  StateDict result;
  for (const StateDict::Item& item : state_dict) {
    if (item.fqn.starts_with("state.")) {
      const std::size_t dot = item.fqn.rfind('.');
      const std::string name = item.fqn.substr(dot + 1);
      const std::string& renamed_to = new_name(item.fqn.substr(6, dot - 6));
      formats::KeyPath path = {"state", renamed_to, name};
      if (key == OptimStateKey::param_id)
        path[1] = *formats::dict_key(static_cast<std::int64_t>(std::stoll(renamed_to)));
      result.set("state." + renamed_to + "." + name, item.entry, std::move(path));
      continue;
    }
    if (item.fqn.starts_with("param_groups.") && !is_in_numbered_group(item.fqn, state_dict)) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = item.fqn},
                            "key of a parameter group", "the number of a group that has params",
                            "another key",
                            "was flatten_optim_state_dict called before? call it afterwards");
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
