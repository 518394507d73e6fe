#include "recipe/inputs.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "reshard/optimizer_rules.h"
#include "reshard/state_key.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointContents;
using formats::StateKind;
using formats::TensorEntry;

/// Returns whether the contents may have optimizer state. If not, no index of the parameters' names
/// is made.
bool may_have_optimizer(const CheckpointContents& contents) {
  const auto is_of_one = [](const std::string& name) {
    return reshard::behind_state(name) || name.find("param_groups") != std::string::npos;
  };
  return std::ranges::any_of(
             contents.tensors, is_of_one,
             [](const TensorEntry& tensor) -> const std::string& { return tensor.meta.fqn; }) ||
         std::ranges::any_of(contents.values, is_of_one, &formats::ValueEntry::name);
}

/// Returns the kind of state that is an alias. `target`: the role of its tensor, which may be a
/// parameter, if a copy of the parameter is the parameter itself.
StateKind kind_of_alias(const reshard::StateRole& target, const StateName& name) {
  if (target.parameter_index) return target.kind;
  return reshard::is_pointwise_name(name.state()) ? StateKind::pointwise : StateKind::opaque;
}

}  // namespace

Inputs::Inputs(const CheckpointContents& contents, const std::string& prefix)
    : has_optimizer_(may_have_optimizer(contents)) {
  const std::vector<reshard::StateRole> roles = reshard::classify_state(contents);
  std::vector<std::size_t> parameters;
  if (has_optimizer_) {
    for (std::size_t i = 0; i < roles.size(); ++i) {
      if (!roles[i].parameter_index) parameters.push_back(i);
    }
  }
  state_names_.emplace(contents, parameters, prefix);
  for (std::size_t i = 0; i < roles.size(); ++i) {
    const TensorEntry& tensor = contents.tensors[i];
    if (roles[i].parameter_index) {
      std::optional<StateName> name;
      if (tensor.parameter.empty()) {  // the prefix may tell another parameter than the role
        if (auto found = state_names_->find(tensor.meta.fqn)) name = std::move(found->name);
      }
      if (!name) name = state_names_->split(tensor.meta.fqn, *roles[i].parameter_index);
      if (name) {
        states_[name->full_name].push_back({&tensor.meta.fqn, &tensor.key_path, i, false,
                                            tensor.dict_order, *name, roles[i].kind});
        continue;
      }
    }
    inputs_.push_back({&tensor.meta.fqn, &tensor.key_path, i, false, tensor.dict_order});
  }
  if (has_optimizer_) find_undecided(contents);
  if (contents.aliases.empty()) return;
  std::map<std::string_view, std::size_t> index;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    index[contents.tensors[i].meta.fqn] = i;
  }
  for (const formats::Alias& alias : contents.aliases) {
    const std::size_t tensor = index.at(alias.target);
    if (auto found = state_names_->find(alias.fqn)) {
      states_[found->name.full_name].push_back({&alias.fqn, &alias.key_path, tensor, true,
                                                alias.dict_order, found->name,
                                                kind_of_alias(roles[tensor], found->name)});
      continue;
    }
    inputs_.push_back({&alias.fqn, &alias.key_path, tensor, true, alias.dict_order});
  }
}

/// Finds state that may belong to several parameters, if nothing tells to which; also if the prefix
/// or the dict of the model gives one parameter the state of two optimizers.
void Inputs::find_undecided(const CheckpointContents& contents) {
  struct OfParameter {
    std::string_view parameter;
    std::string rest;
    std::string state;
    auto operator<=>(const OfParameter&) const = default;
  };
  std::map<OfParameter, std::string> root_of;
  const auto consider = [&](const std::string& fqn, const StateName& name) {
    StateNames::Candidates candidates = state_names_->candidates_for(name.parameter, fqn);
    if (candidates.names.size() < 2) return;
    const auto [known, is_new] = root_of.emplace(
        OfParameter{name.full_name, name.rest, std::string(name.state())}, name.root);
    if (candidates.is_decided && (is_new || known->second == name.root)) return;
    undecided_.push_back({&fqn, std::move(candidates.names)});
  };
  for (const auto& [parameter, states] : states_) {
    for (const State& state : states) {
      if (contents.tensors[state.tensor].parameter.empty()) consider(*state.fqn, state.name);
    }
  }
  for (const formats::ValueEntry& value : contents.values) {
    if (const auto found = state_names_->find(value.name)) consider(value.name, found->name);
  }
}

const std::vector<State>& Inputs::states_of(const Input& parameter) const {
  static const std::vector<State> kNone;
  const auto found = states_.find(*parameter.name);
  return found == states_.end() ? kNone : found->second;
}

}  // namespace tessera::recipe
