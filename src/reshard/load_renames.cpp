#include "reshard/load_renames.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "base/text_parts.h"
#include "tessera/base/shape.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::Finding;

constexpr std::string_view kModel = "model.";
constexpr std::string_view kStatePart = "state.";
constexpr std::string_view kGroupsPart = "param_groups.";

/// Returns what comes before `state.` or `param_groups.` in a name that may be of an optimizer:
/// `optim.` of `optim.state.fc.weight.step`. Returns nothing for other names.
std::optional<std::string> possible_prefix(const std::string& name) {
  if (name.starts_with(kModel)) return std::nullopt;
  const std::size_t begin = name.find('.') + 1;  // 0 if there is no dot
  for (const std::size_t at : {std::size_t{0}, begin}) {
    const std::string_view rest = std::string_view(name).substr(at);
    if (rest.starts_with(kStatePart) || rest.starts_with(kGroupsPart)) return name.substr(0, at);
  }
  return std::nullopt;
}

/// Returns which of the `optimizers` (optimizer_prefixes) a name belongs to, if any.
std::optional<std::string> optimizer_of(const std::string& name,
                                        const std::set<std::string>& optimizers) {
  auto prefix = possible_prefix(name);
  return prefix && optimizers.contains(*prefix) ? prefix : std::nullopt;
}

bool has_name_below(const CheckpointContents& source, const std::string& prefix) {
  const auto fits = [&](const std::string& name) { return name.starts_with(prefix); };
  return std::ranges::any_of(source.tensors,
                             [&](const auto& tensor) { return fits(tensor.meta.fqn); }) ||
         std::ranges::any_of(source.values, fits, &formats::ValueEntry::name);
}

/// Returns the length of the longest common subsequence of the two names' components.
std::size_t num_common_components(std::string_view a, std::string_view b) {
  const auto left = tessera::detail::split(a, '.');
  const auto right = tessera::detail::split(b, '.');
  std::vector<std::size_t> row(right.size() + 1);
  for (const std::string_view component : left) {
    std::size_t diagonal = 0;
    for (std::size_t i = 0; i < right.size(); ++i) {
      const std::size_t above = row[i + 1];
      row[i + 1] = component == right[i] ? diagonal + 1 : std::max(row[i], row[i + 1]);
      diagonal = above;
    }
  }
  return row.back();
}

/// Returns the rename of a prefix that turns the name `from` into `to`: `{"net.fc.", "net.up."}`
/// for `net.fc.weight` and `net.up.weight`. It leaves out the longest common suffix of whole
/// components.
Rename prefix_rename(std::string_view from, std::string_view to) {
  std::size_t num_common = 0;  // bytes at the end that both names have
  for (std::size_t i = 1; i <= std::min(from.size(), to.size()); ++i) {
    if (from[from.size() - i] != to[to.size() - i]) break;
    const auto begins_component = [i](std::string_view name) {
      return i == name.size() || name[name.size() - i - 1] == '.';
    };
    if (begins_component(from) && begins_component(to)) num_common = i;
  }
  from.remove_suffix(num_common);
  to.remove_suffix(num_common);
  return {std::string(from), std::string(to)};
}

struct NamesOfShape {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
};

/// Adds pairs of an unexpected name (the key) and a missing name (the value). The two must be each
/// other's best match, with no second match that is as good.
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
      const std::size_t score = num_common_components(names.missing[m], names.unexpected[u]);
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

/// The names of tensors that the problems call missing or unexpected.
struct UnmatchedNames {
  std::set<std::string> missing;                 // of the job, not of its optimizer
  std::set<std::string> unexpected;              // of the checkpoint
  std::map<std::string, NamesOfShape> by_shape;  // names that a rename may match
};

UnmatchedNames unmatched_names(const std::vector<Finding>& problems,
                               const CheckpointContents& source, const CheckpointContents& wanted,
                               const std::vector<Rename>& given,
                               const std::set<std::string>& optimizers) {
  UnmatchedNames names;
  for (const Finding& problem : problems) {
    const std::string& fqn = problem.where.fqn;
    if (optimizer_of(fqn, optimizers)) {
      if (problem.rule == "unexpected") names.unexpected.insert(fqn);
    } else if (problem.rule == "missing") {
      const formats::TensorEntry* const tensor = wanted.find_tensor(fqn);
      if (tensor == nullptr && !fqn.starts_with(kModel)) continue;  // a value
      names.missing.insert(fqn);
      if (tensor == nullptr) continue;
      names.by_shape[shape_to_string(tensor->meta.shape)].missing.push_back(fqn);
    } else if (problem.rule == "unexpected") {
      names.unexpected.insert(fqn);
      const formats::TensorEntry* const tensor = source.find_tensor(fqn);
      if (tensor == nullptr || renamed(fqn, given) != fqn) continue;
      names.by_shape[shape_to_string(tensor->meta.shape)].unexpected.push_back(fqn);
    }
  }
  return names;
}

/// Returns renames of prefixes that match names of the same shape, the longest prefixes first.
std::vector<RenamedNames> likely_renames(const UnmatchedNames& names) {
  std::map<std::string, std::string> pairs;  // unexpected -> missing
  for (const auto& [shape, of_shape] : names.by_shape) add_pairs(of_shape, pairs);
  std::vector<RenamedNames> found;
  for (const auto& [from, to] : pairs) {
    const Rename rename = prefix_rename(from, to);
    const bool is_new = std::ranges::none_of(
        found, [&](const RenamedNames& each) { return each.rename.from == rename.from; });
    if (is_new) found.push_back({rename});
  }
  std::ranges::stable_sort(found, [](const RenamedNames& a, const RenamedNames& b) {
    return a.rename.from.size() > b.rename.from.size();
  });
  return found;
}

/// Removes renames that would also change names of the checkpoint that fit already.
void erase_breaking(std::vector<RenamedNames>& found, const CheckpointContents& source,
                    const UnmatchedNames& names) {
  std::erase_if(found, [&](const RenamedNames& each) {
    const auto breaks = [&](const std::string& name) {
      return name.starts_with(each.rename.from) && !names.unexpected.contains(name);
    };
    return std::ranges::any_of(source.tensors,
                               [&](const auto& tensor) { return breaks(tensor.meta.fqn); }) ||
           std::ranges::any_of(source.values, breaks, &formats::ValueEntry::name);
  });
}

/// The names that a rename fixes, each with its rename.
struct MatchedNames {
  std::map<std::string, RenamedNames*> unexpected;
  std::map<std::string, RenamedNames*> missing;
};

/// Applies to each unexpected name the first rename whose prefix it has. Returns the names that
/// then fit, and counts them in `found`.
MatchedNames match_names(std::vector<RenamedNames>& found, const CheckpointContents& source,
                         const CheckpointContents& wanted, const UnmatchedNames& names) {
  const auto has_same_shape = [&](const std::string& from, const std::string& to) {
    const formats::TensorEntry* const old_tensor = source.find_tensor(from);
    const formats::TensorEntry* const new_tensor = wanted.find_tensor(to);
    return old_tensor == nullptr || new_tensor == nullptr ||  // one of them is an alias
           old_tensor->meta.shape == new_tensor->meta.shape;
  };
  MatchedNames matched;
  for (const std::string& from : names.unexpected) {
    const auto rule = std::ranges::find_if(
        found, [&](const RenamedNames& each) { return from.starts_with(each.rename.from); });
    if (rule == found.end()) continue;
    const std::string to = renamed(from, {rule->rename});
    if (!names.missing.contains(to) || !has_same_shape(from, to)) continue;
    ++rule->num_tensors;
    matched.unexpected.emplace(from, &*rule);
    matched.missing.emplace(to, &*rule);
  }
  return matched;
}

/// Returns the rename in `matched` of the parameter to which a name of the optimizer belongs, such
/// as `optim.state.fc.weight.exp_avg`; nullptr if there is none.
RenamedNames* rename_of_parameter(const std::map<std::string, RenamedNames*>& matched,
                                  const std::string& fqn, const std::set<std::string>& optimizers) {
  const auto prefix = optimizer_of(fqn, optimizers);
  if (!prefix) return nullptr;
  const std::size_t begin = fqn.find('.', prefix->size()) + 1;
  const std::size_t end = std::max(begin, fqn.rfind('.'));
  const std::string name = fqn.substr(begin, end - begin);
  for (const std::string& each : {std::string(kModel) + name, name}) {
    if (const auto found = matched.find(each); found != matched.end()) return found->second;
  }
  return nullptr;
}

/// Returns whether the renames of `matched` would fix a problem: of a name, or of that parameter's
/// optimizer state or group. Counts the optimizer's problems in the rename.
bool count_if_fixed(const MatchedNames& matched, const Finding& problem,
                    const std::set<std::string>& optimizers) {
  const std::string& fqn = problem.where.fqn;
  if (problem.rule == "missing") {
    if (matched.missing.contains(fqn)) return true;
    if (rename_of_parameter(matched.missing, fqn, optimizers) != nullptr) return true;
    const auto of_group = matched.missing.find(std::string(kModel) + fqn);
    if (of_group == matched.missing.end()) return false;
    ++of_group->second->num_optimizer_problems;  // the problem is a parameter that no group has
    return true;
  }
  if (problem.rule != "unexpected") return false;
  if (matched.unexpected.contains(fqn)) return true;
  RenamedNames* const of_parameter = rename_of_parameter(matched.unexpected, fqn, optimizers);
  if (of_parameter == nullptr) return false;
  ++of_parameter->num_optimizer_problems;
  return true;
}

}  // namespace

std::set<std::string> optimizer_prefixes(const CheckpointContents& contents) {
  std::set<std::string> prefixes;
  const auto add = [&](const std::string& name) {
    auto prefix = possible_prefix(name);
    if (!prefix) return;
    const bool has_groups = std::string_view(name).substr(prefix->size()).starts_with(kGroupsPart);
    if (has_groups || prefix->starts_with("optim")) prefixes.insert(std::move(*prefix));
  };
  for (const formats::TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn);
  for (const formats::ValueEntry& value : contents.values) add(value.name);
  return prefixes;
}

std::vector<Rename> with_optimizer_renames(const std::vector<Rename>& renames,
                                           const CheckpointContents& source) {
  std::vector<Rename> all = renames;
  if (renames.empty()) return all;
  for (const std::string& optimizer : optimizer_prefixes(source)) {
    // If groups have numbers, the names of their fields contain no parameter names.
    const bool has_numbered_groups =
        has_name_below(source, optimizer + std::string(kGroupsPart) + "0.params");
    for (const Rename& rename : renames) {
      if (!rename.from.starts_with(kModel) || !rename.to.starts_with(kModel)) continue;
      for (const std::string_view part : {kStatePart, kGroupsPart}) {
        const std::string prefix = optimizer + std::string(part);
        if (part == kGroupsPart && has_numbered_groups) continue;
        const std::string from = prefix + rename.from.substr(kModel.size());
        if (!has_name_below(source, from)) continue;
        all.push_back({from, prefix + rename.to.substr(kModel.size())});
      }
    }
  }
  return all;
}

Value with_renamed_members(const std::string& name, Value value,
                           const std::vector<Rename>& renames) {
  const std::string new_list = renamed(name, renames);
  const std::size_t groups = name.find(kGroupsPart);
  const std::size_t new_groups = new_list.find(kGroupsPart);
  auto* const members = value.get_if<Value::List>();
  if (renames.empty() || members == nullptr || groups == std::string::npos ||
      new_groups == std::string::npos || !name.ends_with(".params")) {
    return value;
  }
  const std::string state = name.substr(0, groups) + std::string(kStatePart);
  const std::string new_state = new_list.substr(0, new_groups) + std::string(kStatePart);
  const std::vector<Rename> of_parameters = [&] {
    // `with_optimizer_renames` adds no rename for state that the checkpoint lacks. The list
    // also names parameters without state, so each rename of the model also renames state here.
    std::vector<Rename> all = renames;
    for (const Rename& rename : renames) {
      if (!rename.from.starts_with(kModel) || !rename.to.starts_with(kModel)) continue;
      all.push_back(
          {state + rename.from.substr(kModel.size()), new_state + rename.to.substr(kModel.size())});
    }
    return all;
  }();
  for (Value& each : *members) {
    const auto* const member = each.get_if<std::string>();
    if (member == nullptr) continue;
    const std::string new_name = renamed(state + *member, of_parameters);
    if (new_name.starts_with(new_state)) each = new_name.substr(new_state.size());
  }
  return value;
}

std::vector<RenamedNames> find_renames(const std::vector<Finding>& problems,
                                       const CheckpointContents& source,
                                       const CheckpointContents& wanted,
                                       const std::vector<Rename>& given,
                                       std::vector<bool>& explained) {
  std::set<std::string> optimizers = optimizer_prefixes(source);
  optimizers.merge(optimizer_prefixes(wanted));
  const UnmatchedNames names = unmatched_names(problems, source, wanted, given, optimizers);
  std::vector<RenamedNames> found = likely_renames(names);
  erase_breaking(found, source, names);
  const MatchedNames matched = match_names(found, source, wanted, names);
  explained.assign(problems.size(), false);
  for (std::size_t i = 0; i < problems.size(); ++i) {
    explained[i] = count_if_fixed(matched, problems[i], optimizers);
  }
  std::erase_if(found, [](const RenamedNames& each) { return each.num_tensors == 0; });
  return found;
}

}  // namespace tessera::reshard
