#include "runtime/state/load_renames.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "tessera/base/shape.h"

namespace tessera::state {
namespace {

using formats::CheckpointContents;
using formats::Finding;

constexpr std::string_view kModel = "model.";
constexpr std::string_view kState = "optim.state.";
constexpr std::string_view kGroups = "optim.param_groups.";

bool has_name_below(const CheckpointContents& source, const std::string& prefix) {
  const auto fits = [&](const std::string& name) { return name.starts_with(prefix); };
  return std::ranges::any_of(source.tensors,
                             [&](const auto& tensor) { return fits(tensor.meta.fqn); }) ||
         std::ranges::any_of(source.values, fits, &formats::ValueEntry::name);
}

std::vector<std::string_view> steps_of(std::string_view name) {
  std::vector<std::string_view> steps;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t dot = std::min(name.find('.', at), name.size());
    steps.push_back(name.substr(at, dot - at));
    at = dot + 1;
  }
  return steps;
}

/// Returns the number of steps that two names have in common, in order.
std::size_t num_common_steps(std::string_view a, std::string_view b) {
  const auto left = steps_of(a);
  const auto right = steps_of(b);
  std::vector<std::size_t> row(right.size() + 1);
  for (const std::string_view step : left) {
    std::size_t diagonal = 0;
    for (std::size_t i = 0; i < right.size(); ++i) {
      const std::size_t above = row[i + 1];
      row[i + 1] = step == right[i] ? diagonal + 1 : std::max(row[i], row[i + 1]);
      diagonal = above;
    }
  }
  return row.back();
}

/// Returns the rename of prefixes that turns one name into the other. The names have the longest
/// possible suffix of whole steps in common.
Rename front_of(std::string_view from, std::string_view to) {
  std::size_t num_common = 0;  // bytes, at the end
  for (std::size_t i = 1; i <= std::min(from.size(), to.size()); ++i) {
    if (from[from.size() - i] != to[to.size() - i]) break;
    const auto begins_step = [i](std::string_view name) {
      return i == name.size() || name[name.size() - i - 1] == '.';
    };
    if (begins_step(from) && begins_step(to)) num_common = i;
  }
  from.remove_suffix(num_common);
  to.remove_suffix(num_common);
  return {std::string(from), std::string(to)};
}

struct NamesOfShape {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
};

/// Adds pairs of a missing and an unexpected name that are each other's only best match, by
/// unexpected name.
void add_pairs(const NamesOfShape& names, std::map<std::string, std::string>& pairs) {
  constexpr std::size_t kMaxComparisons = 1'000'000;
  if (names.missing.size() * names.unexpected.size() > kMaxComparisons) return;
  struct Best {
    std::size_t score = 0;
    std::size_t index = 0;
    bool is_only = false;
    void see(std::size_t its_score, std::size_t its_index) {
      if (its_score > score) {
        *this = {its_score, its_index, true};
      } else if (its_score == score) {
        is_only = false;
      }
    }
  };
  std::vector<Best> of_missing(names.missing.size());
  std::vector<Best> of_unexpected(names.unexpected.size());
  for (std::size_t m = 0; m < names.missing.size(); ++m) {
    for (std::size_t u = 0; u < names.unexpected.size(); ++u) {
      const std::size_t score = num_common_steps(names.missing[m], names.unexpected[u]);
      of_missing[m].see(score, u);
      of_unexpected[u].see(score, m);
    }
  }
  for (std::size_t m = 0; m < names.missing.size(); ++m) {
    const Best& best = of_missing[m];
    if (!best.is_only) continue;
    const Best& back = of_unexpected[best.index];
    if (back.is_only && back.index == m) pairs[names.unexpected[best.index]] = names.missing[m];
  }
}

}  // namespace

std::vector<Rename> with_optimizer_renames(const std::vector<Rename>& renames,
                                           const CheckpointContents& source) {
  std::vector<Rename> all = renames;
  const bool has_numbered_groups = has_name_below(source, std::string(kGroups) + "0.params");
  for (const Rename& rename : renames) {
    if (!rename.from.starts_with(kModel) || !rename.to.starts_with(kModel)) continue;
    for (const std::string_view part : {kState, kGroups}) {
      const std::string from = std::string(part) + rename.from.substr(kModel.size());
      const std::string to = std::string(part) + rename.to.substr(kModel.size());
      // If groups are numbered, their names have no parameter names.
      if (part == kGroups && has_numbered_groups) continue;
      if (has_name_below(source, from)) all.push_back({from, to});
    }
  }
  return all;
}

Value with_renamed_members(const std::string& name, Value value,
                           const std::vector<Rename>& renames) {
  constexpr std::string_view kGroupsStep = "param_groups.";
  const std::size_t groups = name.find(kGroupsStep);
  auto* const members = value.get_if<Value::List>();
  if (renames.empty() || members == nullptr || groups == std::string::npos ||
      !name.ends_with(".params")) {
    return value;
  }
  const std::string state = name.substr(0, groups) + "state.";
  const std::vector<Rename> of_parameters = [&] {
    // A parameter without state has no names in the checkpoint that tell how to rename its state.
    std::vector<Rename> all = renames;
    for (const Rename& rename : renames) {
      if (!rename.from.starts_with(kModel) || !rename.to.starts_with(kModel)) continue;
      all.push_back({state + rename.from.substr(kModel.size()),
                     std::string(kState) + rename.to.substr(kModel.size())});
    }
    return all;
  }();
  for (Value& each : *members) {
    const auto* const member = each.get_if<std::string>();
    if (member == nullptr) continue;
    const std::string new_name = renamed(state + *member, of_parameters);
    if (new_name.starts_with(kState)) each = new_name.substr(kState.size());
  }
  return value;
}

std::vector<RenamedNames> find_renames(const std::vector<Finding>& problems,
                                       const CheckpointContents& source,
                                       const CheckpointContents& wanted,
                                       const std::vector<Rename>& given,
                                       std::vector<bool>& explained) {
  explained.assign(problems.size(), false);
  std::map<std::string, NamesOfShape> by_shape;
  std::set<std::string> missing;
  std::set<std::string> unexpected;
  for (const Finding& problem : problems) {
    const std::string& fqn = problem.where.fqn;
    if (problem.rule == "missing" && fqn.starts_with(kModel)) {
      missing.insert(fqn);
      const formats::TensorEntry* const tensor = wanted.find_tensor(fqn);
      if (tensor != nullptr) by_shape[shape_to_string(tensor->meta.shape)].missing.push_back(fqn);
    } else if (problem.rule == "unexpected") {
      unexpected.insert(fqn);
      const formats::TensorEntry* const tensor = source.find_tensor(fqn);
      const bool is_of_optimizer = fqn.starts_with("optim.");
      if (tensor == nullptr || is_of_optimizer || renamed(fqn, given) != fqn) continue;
      by_shape[shape_to_string(tensor->meta.shape)].unexpected.push_back(fqn);
    }
  }
  std::map<std::string, std::string> pairs;  // unexpected -> missing
  for (const auto& [shape, names] : by_shape) add_pairs(names, pairs);

  std::vector<RenamedNames> found;
  for (const auto& [from, to] : pairs) {
    const Rename rename = front_of(from, to);
    const bool is_new = std::ranges::none_of(
        found, [&](const RenamedNames& each) { return each.rename.from == rename.from; });
    if (is_new) found.push_back({rename});
  }
  // Longest first. A rename that would also match names of an earlier one is not used.
  std::ranges::stable_sort(found, [](const RenamedNames& a, const RenamedNames& b) {
    return a.rename.from.size() > b.rename.from.size();
  });
  const auto breaks_some = [&](const RenamedNames& each) {
    const auto breaks = [&](const std::string& name) {
      return name.starts_with(each.rename.from) && !unexpected.contains(name);
    };
    return std::ranges::any_of(source.tensors,
                               [&](const auto& tensor) { return breaks(tensor.meta.fqn); }) ||
           std::ranges::any_of(source.values, breaks, &formats::ValueEntry::name);
  };
  std::erase_if(found, breaks_some);

  const auto rule_of = [&](const std::string& name) {
    return std::ranges::find_if(
        found, [&](const RenamedNames& each) { return name.starts_with(each.rename.from); });
  };
  // What each rename fixes: names of the model, and those parameters' optimizer state.
  const auto fit = [&](const std::string& from, const std::string& to) {
    const formats::TensorEntry* const old_tensor = source.find_tensor(from);
    const formats::TensorEntry* const new_tensor = wanted.find_tensor(to);
    return old_tensor == nullptr || new_tensor == nullptr ||  // an alias
           old_tensor->meta.shape == new_tensor->meta.shape;
  };
  std::map<std::string, std::vector<RenamedNames>::iterator, std::less<>> of_old, of_new;
  for (const std::string& from : unexpected) {
    const auto rule = rule_of(from);
    if (rule == found.end()) continue;
    const std::string to = renamed(from, {rule->rename});
    if (!missing.contains(to) || !fit(from, to)) continue;
    ++rule->num_tensors;
    of_old.emplace(from, rule);
    of_new.emplace(to, rule);
  }
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const std::string& fqn = problems[i].where.fqn;
    if (problems[i].rule == "missing") {
      explained[i] = of_new.contains(fqn);
      const auto of_group = of_new.find(std::string(kModel) + fqn);
      if (explained[i] || of_group == of_new.end()) continue;
      explained[i] = true;  // a parameter that no group has
      ++of_group->second->num_optimizer_problems;
    } else if (problems[i].rule == "unexpected") {
      explained[i] = of_old.contains(fqn);
      if (explained[i]) continue;
      for (const std::string_view part : {kState, kGroups}) {
        if (!fqn.starts_with(part)) continue;
        const std::string name = fqn.substr(part.size(), fqn.rfind('.') - part.size());
        const auto of_parameter = of_old.find(std::string(kModel) + name);
        if (of_parameter == of_old.end()) continue;
        explained[i] = true;
        ++of_parameter->second->num_optimizer_problems;
      }
    }
  }
  std::erase_if(found, [](const RenamedNames& each) { return each.num_tensors == 0; });
  return found;
}

}  // namespace tessera::state
