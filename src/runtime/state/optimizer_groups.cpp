#include "runtime/state/optimizer_groups.h"

#include <string>
#include <unordered_map>

namespace tessera::state {
namespace {

std::vector<std::string> names_in(const Value::Dict& fields) {
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

}  // namespace

std::vector<std::optional<Value::Dict>> match_groups(
    const std::vector<OptimizerParameter>& parameters, std::size_t num_groups,
    const std::vector<Value::Dict>& saved, LoadReport& report) {
  std::unordered_map<std::string, std::size_t> group_of;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    for (const std::string& name : names_in(saved[i])) group_of.emplace(name, i);
  }
  std::vector<std::optional<std::size_t>> match(num_groups);
  for (const OptimizerParameter& parameter : parameters) {
    const auto it = group_of.find(parameter.fqn);
    if (it == group_of.end()) {
      if (!report.options.allow_missing) {
        report.add("missing", parameter.fqn, "a group that has it", "none");
      }
      continue;
    }
    std::optional<std::size_t>& matched = match[parameter.group];
    if (!matched) {
      matched = it->second;
    } else if (*matched != it->second) {
      report.add("groups", parameter.fqn,
                 "the parameters of group " + std::to_string(parameter.group) + " in one group",
                 "in groups " + std::to_string(*matched) + " and " + std::to_string(it->second));
    }
  }
  std::vector<std::optional<Value::Dict>> fields(num_groups);
  for (std::size_t group = 0; group < num_groups; ++group) {
    if (match[group]) fields[group] = saved[*match[group]];
  }
  return fields;
}

}  // namespace tessera::state
