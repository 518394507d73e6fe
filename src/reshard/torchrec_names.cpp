#include "reshard/torchrec_names.h"

#include "tessera/reshard/planner.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "formats/per_rank.h"
#include "reshard/optimizer_rules.h"
#include "reshard/state_key.h"
#include "reshard/tied_tables.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::KeyPath;
using formats::StateKind;

constexpr std::string_view kFirst = "momentum1";
constexpr std::string_view kSecond = "exp_avg_sq";
constexpr std::string_view kSecondBefore05 = "momentum2";

/// The state of one table: tensor indices by the last component of their names.
using TableState = std::map<std::string_view, std::size_t>;
/// The state of all tables, by the name of the weight in the names of the state.
using TableStates = std::map<std::string_view, TableState>;

/// New last components of names, by the present one.
using Ends = std::map<std::string_view, std::string_view>;

/// Returns the state that tells a table's optimizer. A rank may have only some of it as its own
/// (`per_rank.<rank>.…`). Then the shared state of the table tells, and a name of the rank gets the
/// same end as the shared name, so that it still stands for it.
TableState telling_state(const TableStates& tables, std::string_view weight) {
  const TableState& state = tables.at(weight);
  const auto shared = tables.find(formats::name_without_rank(weight));
  if (shared == tables.end()) return state;
  TableState telling = shared->second;
  telling.insert(state.begin(), state.end());
  return telling;
}

bool has_names(const TableState& state, std::initializer_list<std::string_view> names) {
  return state.size() == names.size() &&
         std::ranges::all_of(names, [&](std::string_view name) { return state.contains(name); });
}

/// Returns a key path whose end, which spells `from`, is replaced by `to`. Returns an empty path if
/// `path` does not end in this way.
KeyPath with_end(KeyPath path, std::string_view from, std::string_view to) {
  std::string end;
  while (!path.empty()) {
    const std::string key = formats::spell({path.back()});
    path.pop_back();
    end.insert(0, end.empty() ? key : key + ".");
    if (end.size() < from.size()) continue;
    path.emplace_back(end.substr(0, end.size() - from.size()).append(to));
    return path;
  }
  return {};
}

/// Collects new names, which differ from the stored names in their last components.
class Names {
 public:
  explicit Names(const CheckpointContents& contents) : contents_(contents) {}

  void replace_end(std::size_t tensor_index, std::size_t end_size, std::string_view to) {
    const formats::TensorEntry& tensor = contents_.tensors[tensor_index];
    const std::string& fqn = tensor.meta.fqn;
    const std::size_t keep = fqn.size() - end_size;
    names_.push_back({tensor_index, fqn.substr(0, keep).append(to),
                      with_end(tensor.key_path, std::string_view(fqn).substr(keep), to)});
  }

  std::vector<StateName> in_order() {
    std::ranges::sort(names_, {}, &StateName::tensor_index);
    return std::move(names_);
  }

 private:
  const CheckpointContents& contents_;
  std::vector<StateName> names_;
};

bool is_by_row(StateKind kind) {
  return kind == StateKind::row_wise || kind == StateKind::row_wise_per_shard;
}

/// Returns the last components of the canonical names of a table's state, such as `row_sum`; empty
/// if the optimizer is unknown.
Ends canonical_ends(const TableState& state, const std::vector<StateRole>& roles) {
  if (!state.contains(kFirst)) return {};
  const StateKind first_kind = roles[state.at(kFirst)].kind;
  if (has_names(state, {kFirst})) {
    if (is_by_row(first_kind)) return {{kFirst, "row_sum"}};
    if (first_kind == StateKind::pointwise) return {{kFirst, "sum"}};
    return {};
  }
  for (const std::string_view name : {kSecond, kSecondBefore05}) {
    if (!has_names(state, {kFirst, name}) || first_kind != StateKind::pointwise) continue;
    const StateKind second_kind = roles[state.at(name)].kind;
    if (is_by_row(second_kind)) return {{kFirst, "exp_avg"}, {name, "row_exp_avg_sq"}};
    if (second_kind == StateKind::pointwise) return {{kFirst, "exp_avg"}, {name, "exp_avg_sq"}};
  }
  return {};
}

/// Returns the last components of torchrec's names of a table's state, such as `momentum1`; empty
/// if the optimizer is not a fused one.
Ends torchrec_ends(TableState state) {
  state.erase("step");
  for (const std::string_view name : {"sum", "row_sum"}) {
    if (has_names(state, {name})) return {{name, kFirst}};
  }
  for (const std::string_view name : {"exp_avg_sq", "row_exp_avg_sq"}) {
    if (has_names(state, {"exp_avg", name})) return {{"exp_avg", kFirst}, {name, kSecond}};
  }
  return {};
}

/// Returns whether torchrec updates a table in the backward pass, not with torch.optim. Returns
/// nothing if there is a plan that does not name the table.
std::optional<bool> is_fused(const std::string& table, const TableState& state,
                             const TablePlan* plan) {
  if (plan == nullptr) return !(state.contains("sum") && state.contains("step"));
  const auto rule = plan->tables.find(table);
  if (rule == plan->tables.end()) return std::nullopt;
  return rule->second.sharding != TableSharding::data_parallel;
}

/// Returns whether state is that of a matrix. If its weight is not in the checkpoint, the shape of
/// `sum` or `exp_avg` tells; without them, the state is one number for each row.
bool is_of_matrix(const TableState& state, const CheckpointContents& contents,
                  const std::vector<StateRole>& roles) {
  const auto weight = roles[state.begin()->second].parameter_index;
  if (weight) return contents.tensors[*weight].meta.shape.size() == 2;
  return std::ranges::all_of(state, [&](const auto& each) {
    const auto& [name, tensor] = each;
    return (name != "sum" && name != "exp_avg") || contents.tensors[tensor].meta.shape.size() == 2;
  });
}

}  // namespace

std::optional<OptimizerNames> parse_optimizer_names(std::string_view name) {
  if (name == "as-stored") return OptimizerNames::as_stored;
  if (name == "canonical") return OptimizerNames::canonical;
  if (name == "torchrec") return OptimizerNames::torchrec;
  return std::nullopt;
}

std::string_view optimizer_names_name(OptimizerNames names) {
  switch (names) {
    case OptimizerNames::as_stored:
      return "as-stored";
    case OptimizerNames::canonical:
      return "canonical";
    case OptimizerNames::torchrec:
      return "torchrec";
  }
  return "";
}

bool has_torchrec_name(std::string_view fqn) {
  return parse_fused_state_key(fqn).has_value();
}

std::vector<StateName> canonical_names(const CheckpointContents& contents) {
  TableStates tables;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const auto key = parse_fused_state_key(contents.tensors[i].meta.fqn);
    if (key) tables[key->weight].emplace(key->name, i);
  }
  if (tables.empty()) return {};
  const std::vector<StateRole> roles = classify_state(contents);
  Names names(contents);
  for (const auto& [weight, state] : tables) {
    const Ends ends = canonical_ends(telling_state(tables, weight), roles);
    for (const auto& [name, tensor_index] : state) {
      const auto end = ends.find(name);
      if (end == ends.end()) continue;
      const std::size_t key_size = contents.tensors[tensor_index].meta.fqn.size();
      names.replace_end(tensor_index, key_size - weight.size() - 1, end->second);
    }
  }
  return names.in_order();
}

TorchrecNames torchrec_names(const CheckpointContents& contents, const TablePlan* plan) {
  const StateRoots states(contents);
  TableStates tables;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const std::string_view fqn = contents.tensors[i].meta.fqn;
    const std::size_t dot = fqn.rfind('.');
    if (dot == std::string_view::npos || !states.behind_state(fqn)) continue;
    if (table_of_weight(fqn.substr(0, dot)))
      tables[fqn.substr(0, dot)].emplace(fqn.substr(dot + 1), i);
  }
  std::optional<TablePlan> tied_plan;
  if (plan != nullptr && !contents.aliases.empty()) {
    tied_plan = *plan;
    add_rules_for_tied_tables(table_names(contents), *tied_plan);
    plan = &*tied_plan;
  }
  if (tables.empty()) return {};
  const std::vector<StateRole> roles = classify_state(contents, states);
  Names names(contents);
  std::vector<std::size_t> without_rule;
  for (const auto& [weight, state] : tables) {
    const std::string table = *table_of_weight(weight);
    const TableState telling = telling_state(tables, weight);
    const std::optional<bool> fused = is_fused(table, telling, plan);
    if (fused == false || !is_of_matrix(telling, contents, roles)) continue;
    const Ends ends = torchrec_ends(telling);
    for (const auto& [name, tensor_index] : state) {
      const auto end = ends.find(name);
      if (end == ends.end()) continue;
      if (!fused) {
        without_rule.push_back(tensor_index);
        continue;
      }
      const std::size_t key_size = contents.tensors[tensor_index].meta.fqn.size();
      names.replace_end(tensor_index, key_size - weight.size() - 1,
                        table + "." + std::string(end->second));
    }
  }
  return {names.in_order(), std::move(without_rule)};
}

}  // namespace tessera::reshard
