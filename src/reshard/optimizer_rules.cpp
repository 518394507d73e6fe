#include "reshard/optimizer_rules.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "formats/per_rank.h"
#include "reshard/piece_index.h"
#include "reshard/row_wise_shards.h"
#include "reshard/state_key.h"
#include "tessera/base/error.h"
#include "tessera/layout/table_plan.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::StateKind;
using formats::TensorEntry;

constexpr std::string_view kStateComponent = "state";
constexpr std::string_view kGroupsComponent = "param_groups";
constexpr std::string_view kScalerComponent = "grad_scaler";
constexpr std::string_view kOptimizerDicts[] = {"optim.", "optimizer."};
/// Names of state that no parameter or buffer of a model has, so that they prove a name to be state
/// even if its parameter is not in the checkpoint. The last four are bitsandbytes'.
constexpr std::string_view kNamesOfStateOnly[] = {
    "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg",       "acc_delta",
    "fp32_param",     "master_param",    "row_sum",    "row_exp_avg_sq", "absmax1",
    "absmax2",        "qmap1",           "qmap2"};
/// Other names begin with it too: `exp_avg_sq_row` of Adafactor, `exp_avg_diff` of Adan.
constexpr std::string_view kBeginningOfStateOnly = "exp_avg";
/// Names of bitsandbytes. A model may use them too, so they prove state only after a parameter or a
/// number.
constexpr std::string_view kAmbiguousNames[] = {"state1", "state2"};
constexpr std::string_view kRowWiseNames[] = {"row_sum", "row_exp_avg_sq"};
constexpr std::string_view kScalarNames[] = {"step", "mu", "eta", "mu_product"};

// Names are the user's, so their length is not bounded, and the steps below take time in proportion
// to it. A name deeper than these limits is treated as that of no state.
constexpr int kMaxStateComponents = 8;  // components `state` that are tried, the outermost first
constexpr int kMaxNameComponents = 64;  // components after a parameter's name, or left out of it

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// A parameter, and the key under which it was found: its own or that of an alias.
struct FoundParameter {
  std::size_t index;
  std::string_view fqn;
};

/// Finds parameters by the name that an optimizer uses. This is the parameter's key, perhaps
/// without its first components (`model.`, `app.model.`).
class ParameterNames {
 public:
  ParameterNames(const CheckpointContents& contents, const StateRoots& states) {
    for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
      const TensorEntry& tensor = contents.tensors[i];
      if (states.behind_state(tensor.meta.fqn) || tensor.kind != StateKind::plain) continue;
      add(tensor.meta.fqn, i);
    }
    for (const formats::Alias& alias : contents.aliases) {
      const TensorEntry* target = contents.find_tensor(alias.target);
      if (target == nullptr || states.behind_state(alias.fqn)) continue;
      add(alias.fqn, static_cast<std::size_t>(target - contents.tensors.data()));
    }
    for (auto& [name, named] : by_name_) std::stable_sort(named.begin(), named.end());
  }

  /// Returns the parameter that an optimizer calls `name`, or nothing. `name` may lack first
  /// components of the parameter's key. If several keys fit, prefers the one that shares the
  /// longest beginning with `state` (as in merged checkpoints), then the one that `name` shortens
  /// least: `fc.weight` is `model.fc.weight`, not `model.block.fc.weight`. Of these, prefers the
  /// one in the dict of the model: `model.fc.weight`, not `ema.fc.weight`.
  std::optional<FoundParameter> find(std::string_view name, std::string_view state) const {
    const auto it = by_name_.find(name);
    if (it == by_name_.end()) return std::nullopt;
    const Named* best = nullptr;
    std::size_t most_shared = 0;
    for (std::uint32_t removed = 0; removed <= kMaxPrefixComponents; ++removed) {
      const std::span<const Named> named =
          std::ranges::equal_range(it->second, removed, {}, &Named::num_removed);
      if (named.empty()) continue;
      const auto next = std::ranges::lower_bound(named, state, {}, &Named::fqn);
      std::size_t shared = 0;
      if (next != named.end()) shared = shared_components(next->fqn, state);
      if (next != named.begin()) {
        shared = std::max(shared, shared_components(std::prev(next)->fqn, state));
      }
      if (best != nullptr && shared <= most_shared) continue;
      most_shared = shared;
      best = &best_of_equal(named, state.substr(0, shared), name);
    }
    return FoundParameter{best->index, best->fqn};
  }

 private:
  static constexpr std::uint32_t kMaxPrefixComponents = 3;

  struct Named {
    std::uint32_t num_removed;  // components of the key that the name lacks (count_components)
    std::uint32_t index;
    std::string_view fqn;
    friend bool operator<(const Named& a, const Named& b) {
      return std::tie(a.num_removed, a.fqn) < std::tie(b.num_removed, b.fqn);
    }
  };

  /// Of the keys that begin with `shared` and end with `name`, returns the one that is most clearly
  /// in a dict of the model (count_model_components). Of equal ones, returns the first.
  static const Named& best_of_equal(std::span<const Named> named, std::string_view shared,
                                    std::string_view name) {
    const auto begin = std::ranges::lower_bound(named, shared, {}, &Named::fqn);
    const auto end = std::find_if_not(
        begin, named.end(), [&](const Named& each) { return each.fqn.starts_with(shared); });
    return *std::ranges::max_element(begin, end, {}, [&](const Named& each) {
      return count_model_components(each.fqn.substr(0, each.fqn.size() - name.size()));
    });
  }

  /// Returns the length of the common beginning of two names, up to its last dot.
  static std::size_t shared_components(std::string_view a, std::string_view b) {
    const auto [end, other] = std::ranges::mismatch(a, b);
    const std::string_view shared = a.substr(0, static_cast<std::size_t>(end - a.begin()));
    const std::size_t dot = shared.rfind('.');
    return dot == std::string_view::npos ? 0 : dot + 1;
  }

  void add(std::string_view fqn, std::size_t index) {
    std::string_view name = fqn;
    for (std::uint32_t cut = 0; cut <= kMaxPrefixComponents; ++cut) {
      const std::size_t removed = count_components(fqn.substr(0, fqn.size() - name.size()));
      by_name_[name].push_back(
          {static_cast<std::uint32_t>(removed), static_cast<std::uint32_t>(index), fqn});
      const std::size_t dot = name.find('.');
      if (dot == std::string_view::npos) break;
      name.remove_prefix(dot + 1);
    }
  }

  // The parameters of a name are sorted by `num_removed`, then by fqn.
  std::unordered_map<std::string_view, std::vector<Named>> by_name_;
};

struct ParameterState {
  std::optional<FoundParameter> parameter;
  std::string_view name;  // `exp_avg`, or torchrec's `t0.momentum1`
};

/// Splits `<parameter>.<name>` at the longest parameter that exists. If none exists, tries
/// `<name>.<parameter>`. If that parameter does not exist either, the last component is the name.
ParameterState split_state_name(std::string_view state, std::string_view rest,
                                const ParameterNames& parameters) {
  std::size_t dot = rest.rfind('.');
  for (int i = 0; i < kMaxNameComponents && dot != std::string_view::npos && dot != 0; ++i) {
    const std::string_view parameter = rest.substr(0, dot);
    dot = rest.rfind('.', dot - 1);
    if (has_only_digits(parameter)) continue;
    if (const auto found = parameters.find(parameter, state)) {
      return {found, rest.substr(parameter.size() + 1)};
    }
  }
  if (const auto leading = parse_leading_state_key(rest)) {
    if (const auto found = parameters.find(leading->parameter, state)) {
      return {found, leading->name};
    }
  }
  const std::size_t last = rest.rfind('.');
  return {std::nullopt, last == std::string_view::npos ? rest : rest.substr(last + 1)};
}

/// Classifies state of torchrec's fused optimizers.
StateKind torchrec_kind(std::string_view name, const TensorEntry& state, const TensorEntry& table) {
  if (name == "iter") return StateKind::scalar_table;
  if (state.meta.shape == table.meta.shape) return StateKind::pointwise;
  if (table.meta.shape.size() != 2) return StateKind::opaque;
  const std::int64_t rows = table.meta.shape[0];
  const std::int64_t numel = state.meta.numel();
  if (numel == rows) return StateKind::row_wise;
  const auto num_column_shards =
      static_cast<std::int64_t>(column_widths(regions_of(table), table.meta.shape).size());
  if (state.meta.shape.size() == 1 && numel == rows * num_column_shards) {
    return StateKind::row_wise_per_shard;
  }
  return StateKind::opaque;
}

bool has_one_per_row(const TensorEntry& state, const TensorEntry& parameter) {
  return !state.meta.shape.empty() && !parameter.meta.shape.empty() &&
         state.meta.shape[0] == parameter.meta.shape[0] &&
         state.meta.numel() == state.meta.shape[0];
}

StateRole role_by_name(const CheckpointContents& contents, const TensorEntry& state,
                       std::string_view rest, const ParameterNames& parameters) {
  const ParameterState split = split_state_name(state.meta.fqn, rest, parameters);
  StateRole role{StateKind::opaque, std::nullopt};
  if (split.parameter) {
    role.parameter_index = static_cast<std::uint32_t>(split.parameter->index);
    const TensorEntry& parameter = contents.tensors[split.parameter->index];
    // Of tied tables, each has state under its own name, although their weights are one tensor.
    const auto table = table_of_weight(split.parameter->fqn);
    if (table && split.name.starts_with(*table + ".")) {
      const std::string_view name = split.name.substr(table->size() + 1);
      role.kind = torchrec_kind(name, state, parameter);
      role.is_misnamed = name.starts_with("momentum") && role.kind == StateKind::opaque;
      return role;
    }
    // The name says what the state means, but only if the shape fits.
    role.is_misnamed = is_pointwise_name(split.name) || contains(kRowWiseNames, split.name);
    if (is_pointwise_name(split.name) && state.meta.shape == parameter.meta.shape) {
      role.kind = StateKind::pointwise;
    } else if (contains(kRowWiseNames, split.name) && has_one_per_row(state, parameter)) {
      role.kind = StateKind::row_wise;
    } else if (contains(kScalarNames, split.name) && state.meta.numel() == 1) {
      role.kind = StateKind::scalar_parameter;
    }
    role.is_misnamed = role.is_misnamed && role.kind == StateKind::opaque;
    return role;
  }
  if (is_pointwise_name(split.name)) role.kind = StateKind::pointwise;
  if (contains(kRowWiseNames, split.name)) role.kind = StateKind::row_wise;
  if (contains(kScalarNames, split.name)) role.kind = StateKind::scalar_parameter;
  return role;
}

/// The list of the optimizers of a Lightning trainer.
constexpr std::string_view kListOfLightning = "optimizer_states.";

/// Returns whether text such as `app.optimizer.` ends with the name of an optimizer's dict.
bool is_dict_of_optimizer(std::string_view root) {
  return std::ranges::any_of(kOptimizerDicts, [&](std::string_view name) {
    if (!root.ends_with(name)) return false;
    return root.size() == name.size() || root[root.size() - name.size() - 1] == '.';
  });
}

/// Returns text such as `optimizer.0.` without the number of an optimizer in a list of optimizers.
std::string_view without_number(std::string_view root) {
  if (root.size() < 2) return root;
  const std::size_t begin = root.rfind('.', root.size() - 2) + 1;  // 0 without another dot
  return has_only_digits(root.substr(begin, root.size() - begin - 1)) ? root.substr(0, begin)
                                                                      : root;
}

bool is_known_name(std::string_view name) {
  return is_pointwise_name(name) || contains(kRowWiseNames, name) || contains(kScalarNames, name);
}

/// Returns the part of a name before `state.<rest>`.
std::string_view before_state(std::string_view fqn, std::string_view rest) {
  return fqn.substr(0, fqn.size() - rest.size() - kStateComponent.size() - 1);
}

bool is_name_of_state_only(std::string_view name) {
  return contains(kNamesOfStateOnly, name) || name.starts_with(kBeginningOfStateOnly);
}

bool is_name_of_state(std::string_view name) {
  return is_known_name(name) || is_name_of_state_only(name) || contains(kAmbiguousNames, name);
}

/// Calls `is_it(rest)` with the part of a name after each `state`, until it returns true. Returns
/// that part.
template <class Predicate>
std::optional<std::string_view> find_state(std::string_view name, const Predicate& is_it) {
  auto rest = behind_state(name);
  for (int i = 0; rest && i < kMaxStateComponents; ++i) {
    if (is_it(*rest)) return rest;
    rest = behind_state(*rest);
  }
  return std::nullopt;
}

/// Returns the part of a name after its innermost `state`.
std::optional<std::string_view> behind_innermost_state(std::string_view name) {
  return find_state(name, [](std::string_view rest) { return !behind_state(rest); });
}

/// Returns whether `rest`, the part of a name after a `state`, contains the name of a parameter and
/// proves that this `state` is an optimizer's.
bool proves_state_of_parameter(std::string_view name, std::string_view rest,
                               const ParameterNames& parameters) {
  const ParameterState split = split_state_name(name, rest, parameters);
  if (!split.parameter) return false;
  const std::string_view parameter = split.parameter->fqn;
  // `state.fc.weight.absmax` beside `state.fc.weight`: all of it is a model.
  if (parameter.starts_with(name.substr(0, name.size() - rest.size()))) return false;
  if (is_name_of_state(split.name) || rest.starts_with(parameter)) return true;
  const auto table = table_of_weight(parameter);
  return table && split.name.starts_with(*table + ".");
}

/// Returns whether `rest` begins with a name that only state has, or is that of state of a number.
bool begins_like_state(std::string_view rest) {
  const std::size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return false;
  const std::string_view first = rest.substr(0, dot);
  return is_name_of_state_only(first) ||
         (has_only_digits(first) && is_name_of_state(rest.substr(dot + 1)));
}

/// Returns the part of a name after the `state` of which the name proves that it is an optimizer's.
/// A parameter that is in the checkpoint tells which `state` that is. A name of state alone does
/// not if it is at the end, so it proves only the innermost one.
std::optional<std::string_view> behind_proven_state(std::string_view name,
                                                    const ParameterNames& parameters) {
  auto rest = find_state(name, [&](std::string_view each) {
    return proves_state_of_parameter(name, each, parameters);
  });
  if (!rest) rest = find_state(name, begins_like_state);
  if (rest) return rest;
  rest = behind_innermost_state(name);
  if (!rest) return std::nullopt;
  const std::size_t dot = rest->rfind('.');
  if (dot == std::string_view::npos || !is_name_of_state_only(rest->substr(dot + 1))) {
    return std::nullopt;
  }
  return rest;
}

/// Returns whether `rest` is that of state of a parameter: `<parameter>.<name>` or
/// `<name>.<parameter>`, perhaps without first components of the parameter's name.
bool names_parameter(std::string_view rest, std::string_view parameter) {
  const auto leading = parse_leading_state_key(rest);
  for (int i = 0; i < kMaxNameComponents; ++i) {
    const bool is_first = rest.size() > parameter.size() && rest.starts_with(parameter) &&
                          rest[parameter.size()] == '.';
    if (is_first || (leading && leading->parameter == parameter)) return true;
    const std::size_t dot = parameter.find('.');
    if (dot == std::string_view::npos) return false;
    parameter.remove_prefix(dot + 1);
  }
  return false;
}

/// Returns the part after the `state` of the optimizer in the name of a tensor with a recorded
/// parameter: what names the parameter; else what follows the innermost `state`.
std::optional<std::string_view> behind_state_of(const TensorEntry& tensor) {
  const auto rest = find_state(tensor.meta.fqn, [&](std::string_view each) {
    return names_parameter(each, tensor.parameter);
  });
  return rest ? rest : behind_innermost_state(tensor.meta.fqn);
}

/// Adds the parts of names before `param_groups`.
template <class Roots>
void add_roots_of_groups(const CheckpointContents& contents, Roots& roots) {
  const auto add = [&](std::string_view name) {
    if (const auto root = before_component(name, kGroupsComponent)) roots.insert(*root);
  };
  for (const TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn);
  for (const formats::ValueEntry& value : contents.values) add(value.name);
}

}  // namespace

StateRoots::StateRoots(const CheckpointContents& contents) {
  add_roots_of_groups(contents, roots_);
  std::optional<ParameterNames> parameters;  // only if there are names to prove
  const auto add_root_of = [&](std::string_view name) {
    if (!reshard::behind_state(name) || behind_state(name)) return;
    if (!parameters) parameters.emplace(contents, *this);
    const auto rest = behind_proven_state(name, *parameters);
    if (rest) roots_.insert(before_state(name, *rest));
  };
  for (const TensorEntry& tensor : contents.tensors) {
    const std::string_view fqn = tensor.meta.fqn;
    if (tensor.parameter.empty()) {
      add_root_of(fqn);
    } else if (!behind_state(fqn)) {
      if (const auto rest = behind_state_of(tensor)) roots_.insert(before_state(fqn, *rest));
    }
  }
  for (const formats::ValueEntry& value : contents.values) add_root_of(value.name);
}

std::optional<std::string_view> StateRoots::behind_state(std::string_view fqn) const {
  return find_state(fqn, [&](std::string_view rest) {
    const std::string_view root = before_state(fqn, rest);
    return is_dict_of_optimizer(root) || roots_.contains(root) ||
           roots_.contains(formats::name_without_rank(root));
  });
}

std::optional<std::string_view> StateRoots::root_of(std::string_view fqn) const {
  const auto rest = behind_state(fqn);
  if (!rest) return std::nullopt;
  return before_state(fqn, *rest);
}

std::vector<StateRole> classify_state(const CheckpointContents& contents) {
  return classify_state(contents, StateRoots(contents));
}

std::vector<StateRole> classify_state(const CheckpointContents& contents,
                                      const StateRoots& states) {
  std::optional<ParameterNames> parameters;  // only if there is state that needs them
  std::vector<StateRole> roles(contents.tensors.size());
  for (std::size_t i = 0; i < roles.size(); ++i) {
    const TensorEntry& tensor = contents.tensors[i];
    if (tensor.kind != StateKind::plain) {
      roles[i].kind = tensor.kind;
      if (!tensor.parameter.empty()) {
        const TensorEntry* parameter = contents.find_tensor(tensor.parameter);
        if (parameter != nullptr) {
          roles[i].parameter_index = static_cast<std::size_t>(parameter - contents.tensors.data());
        }
      }
    } else if (const auto rest = states.behind_state(tensor.meta.fqn)) {
      if (!parameters) parameters.emplace(contents, states);
      roles[i] = role_by_name(contents, tensor, *rest, *parameters);
    }
  }
  return roles;
}

std::optional<LeadingStateKey> parse_leading_state_key(std::string_view rest) {
  const std::size_t dot = rest.find('.');
  if (dot == std::string_view::npos || dot + 1 == rest.size()) return std::nullopt;
  const std::string_view name = rest.substr(0, dot);
  if (!is_known_name(name)) return std::nullopt;
  return LeadingStateKey{name, rest.substr(dot + 1)};
}

bool is_copy_of_parameter(std::string_view name) {
  return name == "fp32_param" || name == "param" || name == "master_param";
}

bool is_in_flat_buffers(std::string_view name) {
  const std::size_t at = name.find("optimizer.distributed.dp_group_idx_");
  return at != std::string_view::npos && (at == 0 || name[at - 1] == '.');
}

OptimizerEntries::OptimizerEntries(const CheckpointContents& contents) : states_(contents) {
  const std::vector<StateRole> roles = classify_state(contents, states_);
  for (std::size_t i = 0; i < roles.size(); ++i) {
    const TensorEntry& tensor = contents.tensors[i];
    // A name alone does not prove that a tensor is optimizer state: a model may have a module
    // `state` with a buffer `step`. A recorded kind does not prove it either, because it may come
    // from the name.
    const bool has_kind = roles[i].kind != StateKind::plain && roles[i].kind != StateKind::opaque;
    const bool has_role = roles[i].parameter_index || (has_kind && !behind_state(tensor.meta.fqn));
    if (!has_role && tensor.parameter.empty()) continue;
    by_role_.insert(tensor.meta.fqn);
    if (const auto root = states_.root_of(tensor.meta.fqn)) roots_.insert(*root);
  }
  add_roots_of_groups(contents, roots_);
  for (const std::string_view full_root : roots_) {
    const std::string_view root = formats::name_without_rank(full_root);
    for (std::size_t dot = root.find('.'); dot != std::string_view::npos;
         dot = root.find('.', dot + 1)) {
      const std::string_view dict = root.substr(0, dot + 1);
      const bool is_of_lightning = dict == kListOfLightning;
      if (is_dict_of_optimizer(dict) || is_of_lightning) dicts_.insert(dict);
    }
  }
}

bool OptimizerEntries::may_contain(std::string_view name) const {
  if (contain(name)) return false;
  const std::string_view shared_name = formats::name_without_rank(name);
  return std::ranges::any_of(dicts_,
                             [&](std::string_view dict) { return shared_name.starts_with(dict); });
}

bool OptimizerEntries::contain(std::string_view name) const {
  const std::string_view shared_name = formats::name_without_rank(name);
  if (shared_name != name && contain(shared_name)) return true;
  if (by_role_.contains(name) || is_in_flat_buffers(name)) return true;
  const auto before_scaler = before_component(name, kScalerComponent);
  if (before_scaler && is_dict_of_optimizer(without_number(*before_scaler))) return true;
  return std::ranges::any_of(roots_, [&](std::string_view root) {
    if (!name.starts_with(root)) return false;
    const std::string_view rest = name.substr(root.size());
    const std::string_view component = rest.substr(0, rest.find('.'));
    return component == kStateComponent || component == kGroupsComponent ||
           (component == kScalerComponent && !root.empty());
  });
}

}  // namespace tessera::reshard
