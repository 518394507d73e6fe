#include "recipe/state_names.h"

#include <algorithm>
#include <utility>

#include "reshard/optimizer_rules.h"
#include "reshard/state_key.h"
#include "tessera/layout/table_plan.h"

namespace tessera::recipe {
namespace {

using formats::KeyPath;

/// Returns the positions in a name at which a component begins: 0, and after each dot.
std::vector<std::size_t> suffix_begins(std::string_view name) {
  std::vector<std::size_t> begins{0};
  for (std::size_t dot = name.find('.'); dot != std::string_view::npos;
       dot = name.find('.', dot + 1)) {
    begins.push_back(dot + 1);
  }
  return begins;
}

/// Returns what follows an optimizer's `state`, or else the first component `param_groups`; nothing
/// without one.
std::optional<std::string_view> behind_optimizer_key(std::string_view name,
                                                     const reshard::StateRoots& states) {
  if (const auto rest = states.behind_state(name)) return rest;
  constexpr std::string_view kGroups = "param_groups";
  const auto root = reshard::before_component(name, kGroups);
  if (!root || name.size() <= root->size() + kGroups.size()) return std::nullopt;
  return name.substr(root->size() + kGroups.size() + 1);
}

/// Returns the name of the state with its dot, if it is before the parameter's name: `exp_avg.` of
/// `exp_avg.layers.0.weight`. Returns an empty text if it is not.
std::string_view leading_key(std::string_view fqn, std::string_view rest,
                             const reshard::StateRoots& states) {
  if (!states.behind_state(fqn)) return {};
  const auto leading = reshard::parse_leading_state_key(rest);
  return leading ? rest.substr(0, leading->name.size() + 1) : std::string_view();
}

/// Returns the first components that an optimizer leaves out if it calls the parameter `full_name`
/// `name`; nothing if that cannot be its name.
std::optional<std::string_view> removed_from(std::string_view full_name, std::string_view name) {
  if (!full_name.ends_with(name)) return std::nullopt;
  const std::string_view removed = full_name.substr(0, full_name.size() - name.size());
  if (!removed.empty() && removed.back() != '.') return std::nullopt;
  return removed;
}

/// How well a full name fits; more is better: the first components that it shares with the entry
/// that contains the optimizer's name, then minus those that the optimizer leaves out.
using Fit = std::pair<std::ptrdiff_t, std::ptrdiff_t>;

Fit fit_of(std::string_view full_name, std::string_view removed, std::string_view entry) {
  const auto end_of_shared = std::ranges::mismatch(full_name, entry).in1;
  return {std::count(full_name.begin(), end_of_shared, '.'),
          -static_cast<std::ptrdiff_t>(reshard::count_components(removed))};
}

/// Returns `name.rest` for the new parameter.
std::string rest_of_state(const StateName& name, const std::string& new_parameter) {
  const auto table = table_of_weight(name.parameter);
  const auto new_table = table_of_weight(new_parameter);
  if (!table || !new_table || !name.rest.starts_with("." + *table + ".")) return name.rest;
  return "." + *new_table + name.rest.substr(table->size() + 1);
}

}  // namespace

std::string_view StateName::state() const {
  if (!rest.empty()) return std::string_view(rest).substr(1);
  const std::string_view leading = std::string_view(root).substr(0, root.size() - 1);
  return leading.substr(leading.rfind('.') + 1);
}

StateNames::StateNames(const formats::CheckpointContents& contents,
                       const std::vector<std::size_t>& parameters, std::string prefix)
    : states_(contents), prefix_(std::move(prefix)) {
  constexpr std::size_t kMaxRemoved = 4;
  const auto add = [&](std::string_view name, std::size_t tensor) {
    names_[tensor].push_back(name);
    const std::vector<std::size_t> begins = suffix_begins(name);
    for (std::size_t i = 0; i < std::min(begins.size(), kMaxRemoved); ++i) {
      by_suffix_[name.substr(begins[i])].push_back(tensor);
    }
  };
  std::unordered_map<std::string_view, std::size_t> index;
  for (const std::size_t tensor : parameters) {
    add(contents.tensors[tensor].meta.fqn, tensor);
    index.emplace(contents.tensors[tensor].meta.fqn, tensor);
  }
  for (const formats::Alias& alias : contents.aliases) {
    const auto target = index.find(alias.target);
    if (target != index.end()) add(alias.fqn, target->second);
  }
}

std::optional<StateName> StateNames::split(std::string_view fqn, std::size_t parameter) const {
  const auto rest = behind_optimizer_key(fqn, states_);
  const auto names = names_.find(parameter);
  if (!rest || names == names_.end()) return std::nullopt;
  // The longest of the names, then the one that fits best.
  std::optional<std::pair<std::size_t, Fit>> best;
  std::string_view best_name;
  for (const std::string_view name : names->second) {
    for (const std::size_t begin : suffix_begins(name)) {
      const std::string_view suffix = name.substr(begin);
      if (!rest->starts_with(suffix) || rest->size() <= suffix.size() ||
          (*rest)[suffix.size()] != '.') {
        continue;
      }
      const std::pair rank(suffix.size(), fit_of(name, name.substr(0, begin), fqn));
      if (best && rank <= *best) continue;
      best = rank;
      best_name = name;
    }
  }
  if (best) {
    return StateName{std::string(fqn.substr(0, fqn.size() - rest->size())),
                     std::string(rest->substr(0, best->first)), best_name,
                     std::string(rest->substr(best->first))};
  }
  const std::string_view key = leading_key(fqn, *rest, states_);
  if (key.empty()) return std::nullopt;
  const std::string_view parameter_name = rest->substr(key.size());
  for (const std::string_view name : names->second) {
    const auto removed = removed_from(name, parameter_name);
    if (!removed) continue;
    const std::pair rank(parameter_name.size(), fit_of(name, *removed, fqn));
    if (best && rank <= *best) continue;
    best = rank;
    best_name = name;
  }
  if (!best) return std::nullopt;
  return StateName{std::string(fqn.substr(0, fqn.size() - parameter_name.size())),
                   std::string(parameter_name), best_name, ""};
}

std::optional<StateNames::Found> StateNames::find(std::string_view name) const {
  const auto rest = behind_optimizer_key(name, states_);
  if (!rest) return std::nullopt;
  for (std::size_t dot = rest->rfind('.'); dot != std::string_view::npos && dot != 0;
       dot = rest->rfind('.', dot - 1)) {
    if (reshard::has_only_digits(rest->substr(0, dot))) continue;  // also the number of a group
    const auto found = find_parameter(rest->substr(0, dot), name);
    if (!found) continue;
    auto split_name = split(name, found->parameter);
    if (!split_name) continue;
    return Found{*std::move(split_name), found->parameter};
  }
  const std::string_view key = leading_key(name, *rest, states_);
  if (key.empty()) return std::nullopt;
  const auto found = find_parameter(rest->substr(key.size()), name);
  if (!found) return std::nullopt;
  auto split_name = split(name, found->parameter);
  if (!split_name) return std::nullopt;
  return Found{*std::move(split_name), found->parameter};
}

std::optional<StateNames::Found> StateNames::find_parameter(std::string_view name,
                                                            std::string_view entry) const {
  const auto found = by_suffix_.find(name);
  if (found == by_suffix_.end()) return std::nullopt;
  std::optional<Found> best;
  std::pair<Fit, std::pair<bool, std::size_t>> best_fit;
  for (const std::size_t tensor : found->second) {
    for (const std::string_view own : names_.at(tensor)) {
      const auto removed = removed_from(own, name);
      if (!removed) continue;
      const std::pair fit(fit_of(own, *removed, entry), model_fit(own, *removed));
      if (best && fit <= best_fit) continue;
      best_fit = fit;
      best = Found{StateName{"", std::string(name), own, ""}, tensor};
    }
  }
  return best;
}

bool StateNames::is_of_number(std::string_view name) const {
  const auto rest = states_.behind_state(name);
  return rest && reshard::has_only_digits(rest->substr(0, rest->find('.')));
}

StateNames::Candidates StateNames::candidates_for(std::string_view name,
                                                  std::string_view entry) const {
  Candidates result;
  const auto best = find_parameter(name, entry);
  if (!best) return result;
  const std::string_view best_name = best->name.full_name;
  const auto fit_to = [&](std::string_view own, std::string_view removed) {
    return std::pair(fit_of(own, removed, entry), model_fit(own, removed));
  };
  const auto best_fit = fit_to(best_name, *removed_from(best_name, name));
  for (const std::size_t tensor : by_suffix_.at(name)) {
    for (const std::string_view own : names_.at(tensor)) {
      const auto removed = removed_from(own, name);
      if (!removed || std::ranges::find(result.names, own) != result.names.end()) continue;
      const auto fit = fit_to(own, *removed);
      if (fit.first != best_fit.first) continue;
      if (own != best_name && fit.second == best_fit.second) result.is_decided = false;
      result.names.push_back(own);
    }
  }
  return result;
}

std::pair<bool, std::size_t> StateNames::model_fit(std::string_view full_name,
                                                   std::string_view removed) const {
  return {!prefix_.empty() && full_name.starts_with(prefix_),
          reshard::count_model_components(removed)};
}

std::string optimizer_name_of(const std::string& fqn, const StateName& name,
                              const Wrappers& wrappers) {
  const std::string removed = wrappers.removed_from(
      name.full_name.substr(0, name.full_name.size() - name.parameter.size()));
  if (!fqn.starts_with(removed)) return fqn;
  return fqn.substr(removed.size());
}

std::string name_of_state(const StateName& name, const std::string& new_parameter) {
  return name.root + new_parameter + rest_of_state(name, new_parameter);
}

KeyPath path_of_new_name(const KeyPath& path, const std::string& old_name,
                         const std::string& new_name) {
  if (path.empty() || formats::spell(path) != old_name) return {};
  if (old_name == new_name) return path;
  KeyPath result;
  std::string spelled;
  for (std::size_t i = 0; i + 1 < path.size(); ++i) {
    const std::string next = spelled + formats::spell({path[i]}) + ".";
    if (!std::holds_alternative<std::string>(path[i]) || !new_name.starts_with(next)) break;
    result.push_back(path[i]);
    spelled = next;
  }
  result.emplace_back(new_name.substr(spelled.size()));
  return result;
}

KeyPath path_of_state(const KeyPath& path, const StateName& name,
                      const std::string& new_parameter) {
  if (name.rest.empty()) {
    return path_of_new_name(path, name.root + name.parameter, name.root + new_parameter);
  }
  if (path.size() < 2 || formats::spell({path[path.size() - 2]}) != name.parameter) {
    return path_of_new_name(path, name.root + name.parameter + name.rest,
                            name_of_state(name, new_parameter));
  }
  KeyPath result = path;
  result[path.size() - 2] = new_parameter;
  const std::string rest = rest_of_state(name, new_parameter);
  if (rest != name.rest) result.back() = rest.substr(1);
  return result;
}

}  // namespace tessera::recipe
