#include "runtime/state/optimizer_groups.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

namespace tessera::state {
namespace {

using formats::KeyPath;

bool has_members(const Value::Dict& fields) {
  return std::ranges::any_of(fields,
                             [](const auto& field) { return field.first == Value("params"); });
}

KeyPath below(KeyPath path, formats::Key key) {
  path.push_back(std::move(key));
  return path;
}

std::vector<Value::Dict> numbered_groups(const ValueTree& tree, const KeyPath& path) {
  std::vector<Value::Dict> groups;
  for (std::int64_t group = 0;; ++group) {
    const auto found = tree.find(below(path, group));
    const auto* fields = found ? found->get_if<Value::Dict>() : nullptr;
    if (fields == nullptr || !has_members(*fields)) return groups;
    groups.push_back(*fields);
  }
}

std::set<std::string> names_of(const std::vector<OptimizerParameter>& parameters) {
  std::set<std::string> names;
  for (const OptimizerParameter& parameter : parameters) names.insert(parameter.fqn);
  return names;
}

std::vector<Value::Dict> flattened_groups(const ValueTree& tree, const std::string& prefix,
                                          const std::vector<OptimizerParameter>& parameters) {
  const std::set<std::string> names = names_of(parameters);
  std::map<std::string, Value::Dict> fields_of;  // fields of the group, by parameter
  for (const auto& [name, leaf] : tree.leaves()) {
    if (!name.starts_with(prefix)) continue;
    const std::string rest = name.substr(prefix.size());
    // Finds the longest parameter name that `rest` begins with: there may be a parameter `a.b`
    // beside `a`.
    std::size_t dot = rest.rfind('.');
    while (dot != std::string::npos && dot > 0 && !names.contains(rest.substr(0, dot))) {
      dot = rest.rfind('.', dot - 1);
    }
    if (dot == std::string::npos || dot == 0) continue;
    fields_of[rest.substr(0, dot)].emplace_back(rest.substr(dot + 1), leaf.value);
  }
  std::vector<Value::Dict> groups;
  std::vector<Value::List> members;
  for (auto& [fqn, fields] : fields_of) {
    const auto same = std::ranges::find(groups, fields);
    const auto group = static_cast<std::size_t>(same - groups.begin());
    if (same == groups.end()) {
      groups.push_back(std::move(fields));
      members.emplace_back();
    }
    members[group].emplace_back(fqn);
  }
  for (std::size_t group = 0; group < groups.size(); ++group) {
    groups[group].emplace_back("params", std::move(members[group]));
  }
  return groups;
}

}  // namespace

std::vector<std::string> members_of(const Value::Dict& fields) {
  std::vector<std::string> names;
  for (const auto& [key, value] : fields) {
    const auto* items = value.get_if<Value::List>();
    if (!(key == Value("params")) || items == nullptr) continue;
    for (const Value& item : *items) {
      if (const auto* name = item.get_if<std::string>()) names.push_back(*name);
    }
  }
  return names;
}

KeyPath groups_path(const KeyPath& root) {
  return below(root, std::string("param_groups"));
}

std::vector<Value::Dict> saved_groups(const ValueTree& tree, const KeyPath& root,
                                      const std::vector<OptimizerParameter>& parameters) {
  const KeyPath path = groups_path(root);
  std::vector<Value::Dict> groups = numbered_groups(tree, path);
  if (!groups.empty()) return groups;
  return flattened_groups(tree, formats::spell(path) + ".", parameters);
}

std::vector<UnusedValue> unused_values(const ValueTree& tree, const KeyPath& root,
                                       const std::vector<OptimizerParameter>& parameters,
                                       const std::function<bool(const std::string&)>& is_known) {
  const std::string top = root.empty() ? "" : formats::spell(root) + ".";
  const std::string prefix = formats::spell(groups_path(root)) + ".";
  const std::set<std::string> names = names_of(parameters);
  const std::vector<Value::Dict> numbered = numbered_groups(tree, groups_path(root));
  std::vector<UnusedValue> unused;
  for (const auto& [key, leaf] : tree.leaves()) {
    if (!key.starts_with(top)) continue;
    if (!key.starts_with(prefix)) {
      unused.push_back({key, ""});
      continue;
    }
    const std::string rest = key.substr(prefix.size());
    bool is_used = false;
    if (numbered.empty()) {
      const std::size_t dot = rest.rfind('.');
      for (std::size_t end = dot; end != std::string::npos && end > 0 && !is_used;
           end = rest.rfind('.', end - 1)) {
        const std::string name = rest.substr(0, end);
        is_used = names.contains(name) || is_known(name);
      }
    } else {
      const std::string number = rest.substr(0, rest.find('.'));
      for (std::size_t group = 0; group < numbered.size() && !is_used; ++group) {
        is_used = number == std::to_string(group);
      }
    }
    if (!is_used) unused.push_back({key, ""});
  }
  for (std::size_t group = 0; group < numbered.size(); ++group) {
    for (const std::string& name : members_of(numbered[group])) {
      if (names.contains(name) || is_known(name)) continue;
      unused.push_back({prefix + std::to_string(group) + ".params", name});
    }
  }
  return unused;
}

std::vector<std::optional<Value::Dict>> match_groups(
    const std::vector<OptimizerParameter>& parameters, std::size_t num_groups,
    const std::vector<Value::Dict>& saved, LoadReport& report) {
  std::unordered_map<std::string, std::size_t> group_of;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    for (const std::string& name : members_of(saved[i])) group_of.emplace(name, i);
  }
  std::vector<std::optional<std::size_t>> match(num_groups);
  for (const OptimizerParameter& parameter : parameters) {
    const auto it = group_of.find(parameter.fqn);
    if (it == group_of.end()) {
      if (!report.options.allow_missing) {
        report.add("missing", parameter.fqn, "a parameter group that has it", "none");
      }
      continue;
    }
    std::optional<std::size_t>& matched = match[parameter.group];
    if (!matched) {
      matched = it->second;
    } else if (*matched != it->second) {
      report.add(
          "groups", parameter.fqn,
          "the parameters of group " + std::to_string(parameter.group) + " in one saved group",
          "parameters in the saved groups " + std::to_string(*matched) + " and " +
              std::to_string(it->second));
    }
  }
  std::vector<std::optional<Value::Dict>> fields(num_groups);
  for (std::size_t group = 0; group < num_groups; ++group) {
    if (match[group]) fields[group] = saved[*match[group]];
  }
  return fields;
}

}  // namespace tessera::state
