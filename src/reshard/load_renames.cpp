#include "reshard/load_renames.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>

#include "base/text_parts.h"
#include "formats/per_rank_rules.h"
#include "reshard/state_key.h"
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

/// Returns the names of the optimizers in `names` (optimizer_prefixes).
std::set<std::string> prefixes_in(const std::vector<std::string>& names) {
  std::set<std::string> prefixes;
  for (const std::string& name : names) {
    auto prefix = possible_prefix(name);
    if (!prefix) continue;
    const bool has_groups = std::string_view(name).substr(prefix->size()).starts_with(kGroupsPart);
    if (has_groups || prefix->starts_with("optim")) prefixes.insert(std::move(*prefix));
  }
  return prefixes;
}

std::vector<std::string> all_names(const CheckpointContents& contents) {
  std::vector<std::string> names;
  names.reserve(contents.tensors.size() + contents.aliases.size() + contents.values.size());
  for (const formats::TensorEntry& tensor : contents.tensors) names.push_back(tensor.meta.fqn);
  for (const formats::Alias& alias : contents.aliases) names.push_back(alias.fqn);
  for (const formats::ValueEntry& value : contents.values) names.push_back(value.name);
  return names;
}

/// Returns what comes before the names of an optimizer's `parameters` in the names of the model:
/// the beginning with which `names` have the most of them. Returns nothing if they have none.
std::optional<std::string> model_prefix(const std::vector<std::string>& names,
                                        const std::string& optimizer,
                                        std::set<std::string_view> parameters) {
  std::map<std::string_view, std::size_t> counts;  // of parameters, by what is before them
  const auto is_of_optimizer = [&](const std::string& name) {
    return possible_prefix(name) == optimizer;
  };
  for (const std::string& name : names) {
    if (is_of_optimizer(name)) parameters.insert(parameter_in_name(name, optimizer));
  }
  std::erase_if(parameters, [](std::string_view each) { return has_only_digits(each); });
  for (const std::string& name : names) {
    if (is_of_optimizer(name)) continue;
    for (std::size_t at = 0; at < name.size();) {
      if (parameters.contains(std::string_view(name).substr(at))) {
        ++counts[std::string_view(name).substr(0, at)];
      }
      at = std::min(name.find('.', at), name.size() - 1) + 1;
    }
  }
  // Of several, such as `model.` and `ema.`, prefers the trained model's, then the shortest.
  const auto is_worse = [](const auto& a, const auto& b) {
    const auto rank = [](const auto& each) {
      return std::tuple(each.second, count_model_components(each.first),
                        -static_cast<std::ptrdiff_t>(each.first.size()));
    };
    return rank(a) < rank(b);
  };
  const auto best = std::ranges::max_element(counts, is_worse);
  if (best == counts.end()) return std::nullopt;
  return std::string(best->first);
}

/// Returns the optimizer's prefix in the job's model; `in_source` if the job does not tell.
std::string model_in_job(const ModelPrefixes& models_of_job, const std::string& optimizer,
                         const std::string& in_source) {
  const auto found = models_of_job.find(optimizer);
  return found == models_of_job.end() ? in_source : found->second;
}

/// Returns the rename of a parameter's name without the prefixes of the models: `{"fc.", "up."}`
/// for `{"model.fc.", "model.up."}`. Returns nothing if it does not change such names.
std::optional<Rename> rename_of_parameters(const Rename& rename, const std::string& model_in_source,
                                           const std::string& model_in_job) {
  if (!rename.from.starts_with(model_in_source) || !rename.to.starts_with(model_in_job)) {
    return std::nullopt;
  }
  Rename inner{rename.from.substr(model_in_source.size()), rename.to.substr(model_in_job.size())};
  if (inner.from == inner.to) return std::nullopt;
  return inner;
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

/// Adds pairs of an unexpected name (the key) and a missing name (the value), if one rename turns
/// all unexpected names into missing ones.
void add_pairs_of_one_rename(const NamesOfShape& names, std::map<std::string, std::string>& pairs) {
  // If there is such a rename, it keeps the order of the names, except that it may put them behind
  // or before missing names that it does not give.
  const std::set<std::string> missing(names.missing.begin(), names.missing.end());
  const auto first = std::ranges::min_element(names.unexpected);
  const Rename rename = prefix_rename(*first, *missing.begin());
  std::map<std::string, std::string> found;
  for (const std::string& from : names.unexpected) {
    std::string to = renamed(from, {rename});
    if (!from.starts_with(rename.from) || !missing.contains(to)) return;
    found.emplace(from, std::move(to));
  }
  pairs.merge(found);
}

/// Adds pairs of an unexpected name (the key) and a missing name (the value). The two must be each
/// other's best match, with no second match that is as good.
void add_pairs(const NamesOfShape& names, std::map<std::string, std::string>& pairs) {
  constexpr std::size_t kMaxComparisons = 1'000'000;
  if (names.missing.empty() || names.unexpected.empty()) return;
  if (names.missing.size() * names.unexpected.size() > kMaxComparisons) {
    return add_pairs_of_one_rename(names, pairs);
  }
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

/// Returns the names of tensors that the problems call missing or unexpected, and that a rename may
/// match, by shape.
std::map<std::string, NamesOfShape> unmatched_names(const std::vector<Finding>& problems,
                                                    const CheckpointContents& source,
                                                    const CheckpointContents& wanted,
                                                    const std::vector<Rename>& given) {
  std::set<std::string> optimizers = optimizer_prefixes(source);
  optimizers.merge(optimizer_prefixes(wanted));
  std::map<std::string, NamesOfShape> by_shape;
  for (const Finding& problem : problems) {
    const std::string& fqn = problem.where.fqn;
    const bool is_missing = problem.rule == "missing";
    if (!is_missing && problem.rule != "unexpected") continue;
    if (optimizer_of(fqn, optimizers)) continue;
    const formats::TensorEntry* const tensor = (is_missing ? wanted : source).find_tensor(fqn);
    if (tensor == nullptr) continue;  // a value or an alias
    NamesOfShape& names = by_shape[shape_to_string(tensor->meta.shape)];
    if (is_missing) {
      names.missing.push_back(fqn);
    } else if (renamed(fqn, given) == fqn) {
      names.unexpected.push_back(fqn);
    }
  }
  return by_shape;
}

}  // namespace

std::string_view parameter_in_name(std::string_view name, std::string_view optimizer) {
  const std::size_t begin = name.find('.', optimizer.size()) + 1;
  return name.substr(begin, std::max(begin, name.rfind('.')) - begin);
}

std::set<std::string> optimizer_prefixes(const CheckpointContents& contents) {
  return prefixes_in(all_names(contents));
}

ModelPrefixes model_prefixes(const std::vector<std::string>& names) {
  ModelPrefixes models;
  for (const std::string& optimizer : prefixes_in(names)) {
    if (auto model = model_prefix(names, optimizer, {})) models.emplace(optimizer, *model);
  }
  return models;
}

ModelPrefixes model_prefixes(const CheckpointContents& source) {
  return model_prefixes(all_names(source));
}

ImpliedRenames::ImpliedRenames(const CheckpointContents& source, const ModelPrefixes& models_of_job)
    : names_(all_names(source)) {
  std::ranges::sort(names_);
  const ModelPrefixes models = model_prefixes(names_);
  for (const std::string& optimizer : prefixes_in(names_)) {
    const std::string model = model_in_job(models, optimizer, std::string(kModel));
    optimizers_.push_back({optimizer, model, model_in_job(models_of_job, optimizer, model),
                           has_name_below(optimizer + std::string(kGroupsPart) + "0.params")});
  }
}

bool ImpliedRenames::has_name_below(const std::string& prefix) const {
  const auto it = std::ranges::lower_bound(names_, prefix);
  return it != names_.end() && it->starts_with(prefix);
}

std::vector<Rename> ImpliedRenames::of(const Rename& rename) const {
  std::vector<Rename> implied;
  for (const Optimizer& optimizer : optimizers_) {
    const auto inner =
        rename_of_parameters(rename, optimizer.model_in_source, optimizer.model_in_job);
    if (!inner) continue;
    for (const std::string_view part : {kStatePart, kGroupsPart}) {
      if (part == kGroupsPart && optimizer.has_numbered_groups) continue;
      const std::string prefix = optimizer.prefix + std::string(part);
      if (!has_name_below(prefix + inner->from)) continue;
      implied.push_back({prefix + inner->from, prefix + inner->to});
    }
  }
  return implied;
}

std::vector<Rename> with_optimizer_renames(const std::vector<Rename>& renames,
                                           const CheckpointContents& source,
                                           const ModelPrefixes& models_of_job) {
  std::vector<Rename> all = renames;
  if (renames.empty()) return all;
  const ImpliedRenames implied(source, models_of_job);
  for (const Rename& rename : renames) {
    for (Rename& each : implied.of(rename)) all.push_back(std::move(each));
  }
  return all;
}

Value with_renamed_members(const std::string& name, Value value, const std::vector<Rename>& renames,
                           const CheckpointContents& source, const ModelPrefixes& models_of_source,
                           const ModelPrefixes& models_of_job) {
  const std::string new_list = renamed(name, renames);
  const std::size_t groups = name.find(kGroupsPart);
  const std::size_t new_groups = new_list.find(kGroupsPart);
  auto* const members = value.get_if<Value::List>();
  if (renames.empty() || members == nullptr || groups == std::string::npos ||
      new_groups == std::string::npos || !name.ends_with(".params")) {
    return value;
  }
  const std::string optimizer = name.substr(0, groups);
  std::set<std::string_view> parameters;
  for (const Value& each : *members) {
    if (const auto* const member = each.get_if<std::string>()) parameters.insert(*member);
  }
  const auto known = models_of_source.find(optimizer);
  const std::string model =
      known != models_of_source.end()
          ? known->second
          : model_prefix(all_names(source), optimizer, parameters).value_or(std::string(kModel));
  const std::string state = optimizer + std::string(kStatePart);
  const std::string new_state = new_list.substr(0, new_groups) + std::string(kStatePart);
  const std::vector<Rename> of_parameters = [&] {
    // `with_optimizer_renames` adds no rename for state that the checkpoint lacks. The list
    // also names parameters without state, so each rename of the model also renames state here.
    std::vector<Rename> all = renames;
    const std::string new_model =
        model_in_job(models_of_job, new_list.substr(0, new_groups), model);
    for (const Rename& rename : renames) {
      const auto inner = rename_of_parameters(rename, model, new_model);
      if (inner) all.push_back({state + inner->from, new_state + inner->to});
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

std::vector<Rename> likely_renames(const std::vector<Finding>& problems,
                                   const CheckpointContents& source,
                                   const CheckpointContents& wanted, const LoadPlanOptions& options,
                                   const ImpliedRenames& implied) {
  std::map<std::string, std::string> pairs;  // unexpected -> missing
  for (const auto& [shape, names] : unmatched_names(problems, source, wanted, options.renames)) {
    add_pairs(names, pairs);
  }
  std::map<std::string, std::string> by_prefix;
  for (const auto& [from, to] : pairs) {
    Rename rename = prefix_rename(from, to);
    by_prefix.emplace(std::move(rename.from), std::move(rename.to));
  }
  std::vector<Rename> found;
  for (const auto& [from, to] : by_prefix) found.push_back({from, to});
  std::ranges::stable_sort(
      found, [](const Rename& a, const Rename& b) { return a.from.size() > b.from.size(); });

  std::set<std::string> unexpected;
  for (const Finding& problem : problems) {
    if (problem.rule == "unexpected") unexpected.insert(problem.where.fqn);
  }
  std::vector<std::string> fitting;  // names that are loaded already
  for (std::string& name : all_names(source)) {
    const bool is_selected =
        options.only.selects(formats::name_after_renames(name, options.renames));
    if (is_selected && !unexpected.contains(name)) fitting.push_back(std::move(name));
  }
  const std::set<std::string> optimizers = optimizer_prefixes(source);
  std::erase_if(found, [&](const Rename& rename) {
    const auto moves = [&](const std::string& optimizer) {
      return optimizer.starts_with(rename.from);
    };
    if (std::ranges::any_of(optimizers, moves)) return true;
    std::vector<Rename> rules = implied.of(rename);
    rules.push_back(rename);
    return std::ranges::any_of(fitting, [&](const std::string& name) {
      const auto changes = [&](const Rename& rule) { return formats::fits_entry(rule, name); };
      return std::ranges::any_of(rules, changes) && std::ranges::none_of(options.renames, changes);
    });
  });
  return found;
}

}  // namespace tessera::reshard
