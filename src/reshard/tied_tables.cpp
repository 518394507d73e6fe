#include "reshard/tied_tables.h"

#include <utility>

#include "formats/per_rank_rules.h"

namespace tessera::reshard {
namespace {

bool is_same_rule(const TableRule& a, const TableRule& b) {
  return a.sharding == b.sharding && a.ranks == b.ranks &&
         a.num_column_shards == b.num_column_shards;
}

}  // namespace

std::vector<TableName> table_names(const formats::CheckpointContents& contents,
                                   const std::vector<Rename>& renames) {
  std::vector<TableName> names;
  const auto add = [&](const std::string& fqn, std::size_t tensor_index) {
    auto table = table_of_weight(formats::name_after_renames(fqn, renames));
    if (table) names.push_back({*std::move(table), fqn, tensor_index});
  };
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) add(contents.tensors[t].meta.fqn, t);
  for (const formats::Alias& alias : contents.aliases) {
    const formats::TensorEntry* target = contents.find_tensor(alias.target);
    if (target == nullptr) continue;
    add(alias.fqn, static_cast<std::size_t>(target - contents.tensors.data()));
  }
  return names;
}

std::map<std::size_t, TableRule> rules_by_tensor(const std::vector<TableName>& names,
                                                 const TablePlan& plan) {
  std::map<std::size_t, TableRule> rules;
  for (const TableName& name : names) {
    const auto rule = plan.tables.find(name.table);
    if (rule != plan.tables.end()) rules.emplace(name.tensor_index, rule->second);
  }
  return rules;
}

std::vector<std::pair<TableName, TableName>> names_with_different_rules(
    const std::vector<TableName>& names, const TablePlan& plan) {
  std::vector<std::pair<TableName, TableName>> pairs;
  std::map<std::size_t, const TableName*> planned;  // the first name with a rule, by tensor
  for (const TableName& name : names) {
    const auto rule = plan.tables.find(name.table);
    if (rule == plan.tables.end()) continue;
    const TableName& first = *planned.emplace(name.tensor_index, &name).first->second;
    if (!is_same_rule(rule->second, plan.tables.at(first.table))) pairs.emplace_back(first, name);
  }
  return pairs;
}

std::string one_rule_for_both(const TableName& first, const TableName& other) {
  return "the same rule for tables " + first.table + " and " + other.table +
         ", because they are tied: one tensor with two names";
}

void add_rules_for_tied_tables(const std::vector<TableName>& names, TablePlan& plan) {
  const std::map<std::size_t, TableRule> rules = rules_by_tensor(names, plan);
  for (const TableName& name : names) {
    const auto rule = rules.find(name.tensor_index);
    if (rule != rules.end()) plan.tables.emplace(name.table, rule->second);
  }
}

}  // namespace tessera::reshard
