#include "reshard/table_plan_check.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "reshard/tied_tables.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::TensorEntry;

void check_planned_tables_are_there(const CheckpointContents& source,
                                    const std::vector<TableName>& names, const PlanOptions& options,
                                    PlanReport& report) {
  const auto& rules = options.table_plan->tables;
  std::set<std::string> tables;
  for (const TableName& name : names) {
    const Shape& shape = source.tensors[name.tensor_index].meta.shape;
    if (shape.size() != 2 && rules.contains(name.table)) {
      report.problem("table plan", name.fqn,
                     "2 dimensions, because the plan has a rule for this tensor",
                     shape_to_string(shape));
    }
    tables.insert(name.table);
  }
  for (const auto& [name, rule] : rules) {
    if (!tables.contains(name)) {
      report.relaxable(options.missing, "table plan", name, "a table of that name", "none");
    }
  }
}

void check_tables_are_planned(const CheckpointContents& source, const std::vector<TableName>& names,
                              const PlanOptions& options, std::span<const MovedTensor> moved,
                              PlanReport& report) {
  const auto rules = rules_by_tensor(names, *options.table_plan);
  std::map<std::size_t, const std::string*> tables;  // the first name of each table, by tensor
  for (const TableName& name : names) tables.emplace(name.tensor_index, &name.table);
  for (const MovedTensor& entry : moved) {
    const TensorEntry& tensor = source.tensors[entry.source_tensor];
    const auto table = tables.find(entry.source_tensor);
    if (table == tables.end() || tensor.meta.shape.size() != 2) continue;
    if (rules.contains(entry.source_tensor)) continue;
    report.problem("table plan", tensor.meta.fqn,
                   "a rule for table " + *table->second + ", or a strategy for tables without one",
                   "neither of them", {Remedy::Action::give_strategy});
  }
}

}  // namespace

void check_table_plan(const CheckpointContents& source, const PlanOptions& options,
                      std::span<const MovedTensor> moved, PlanReport& report) {
  if (!options.table_plan) return;
  const std::vector<TableName> names = table_names(source, options.renames);
  check_planned_tables_are_there(source, names, options, report);
  for (const auto& [first, other] : names_with_different_rules(names, *options.table_plan)) {
    report.problem("table plan", other.fqn, one_rule_for_both(first, other), "two different rules");
  }
  if (options.strategy.empty()) check_tables_are_planned(source, names, options, moved, report);
}

}  // namespace tessera::reshard
