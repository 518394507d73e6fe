#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_plan.h"

// Embedding tables by all their names. If two tables are tied, one tensor has the names of both.
namespace tessera::reshard {

/// A name that is the weight of an embedding table (`table_of_weight`).
struct TableName {
  std::string table;
  std::string fqn;  // of the tensor, or of an alias, before the renames
  std::size_t tensor_index = 0;
};

/// Returns the tables of a checkpoint under their new names: first those of tensors, then those of
/// aliases.
std::vector<TableName> table_names(const formats::CheckpointContents& contents,
                                   const std::vector<Rename>& renames = {});

/// Returns a plan's rule for each tensor that is a table. The key is the index of the tensor. If
/// the plan has rules for several names of a tensor, returns the first one.
std::map<std::size_t, TableRule> rules_by_tensor(const std::vector<TableName>& names,
                                                 const TablePlan& plan);

/// Returns the pairs of names of one tensor whose rules in the plan differ.
std::vector<std::pair<TableName, TableName>> names_with_different_rules(
    const std::vector<TableName>& names, const TablePlan& plan);

/// Returns the `expected` of an error about a plan with different rules for two names of a table.
std::string one_rule_for_both(const TableName& first, const TableName& other);

/// Adds a rule to the plan for each name of a tied table that has none: the rule of its other name.
void add_rules_for_tied_tables(const std::vector<TableName>& names, TablePlan& plan);

}  // namespace tessera::reshard
