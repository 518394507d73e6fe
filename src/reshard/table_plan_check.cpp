#include "reshard/table_plan_check.h"

#include <set>
#include <string>
#include <utility>

#include "reshard/destination_layout.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::TensorEntry;

void check_planned_tables_are_there(const CheckpointContents& source, const PlanOptions& options,
                                    PlanReport& report) {
  const auto& rules = options.table_plan->tables;
  std::set<std::string> tables;
  for (const TensorEntry& tensor : source.tensors) {
    auto table = planned_table(tensor, options);
    if (!table) continue;
    if (tensor.meta.shape.size() != 2 && rules.contains(*table)) {
      report.problem("table plan", tensor.meta.fqn,
                     "2 dimensions, because the plan has a rule for this tensor",
                     shape_to_string(tensor.meta.shape));
    }
    tables.insert(std::move(*table));
  }
  for (const auto& [name, rule] : rules) {
    if (!tables.contains(name)) {
      report.relaxable(options.missing, "table plan", name, "a table of that name", "none");
    }
  }
}

void check_tables_are_planned(const CheckpointContents& source, const PlanOptions& options,
                              std::span<const MovedTensor> moved, PlanReport& report) {
  for (const MovedTensor& entry : moved) {
    const TensorEntry& tensor = source.tensors[entry.source_tensor];
    const auto table = planned_table(tensor, options);
    if (!table || tensor.meta.shape.size() != 2) continue;
    if (options.table_plan->tables.contains(*table)) continue;
    report.problem("table plan", tensor.meta.fqn,
                   "a rule for table " + *table + ", or a strategy for tables without one",
                   "neither of them", {Remedy::Action::give_strategy});
  }
}

}  // namespace

void check_table_plan(const CheckpointContents& source, const PlanOptions& options,
                      std::span<const MovedTensor> moved, PlanReport& report) {
  if (!options.table_plan) return;
  check_planned_tables_are_there(source, options, report);
  if (options.strategy.empty()) check_tables_are_planned(source, options, moved, report);
}

}  // namespace tessera::reshard
