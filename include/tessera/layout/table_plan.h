#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/layout/strategy.h"

namespace tessera {

/// How an embedding table is cut (torchrec's ShardingType) over the ranks in TableRule::ranks.
enum class TableSharding {
  data_parallel,      // every rank holds the whole table
  table_wise,         // one rank holds the whole table
  column_wise,        // the columns are cut over the ranks
  row_wise,           // the rows are cut over the ranks
  table_row_wise,     // the rows are cut over ranks of one host
  table_column_wise,  // the columns are cut over ranks of one host
  grid,               // the columns are cut over groups of ranks, the rows within each group
};

/// Returns the enumerator's name, which plans use, such as `row_wise`.
std::string_view table_sharding_name(TableSharding sharding);
/// Returns the sharding with this name; std::nullopt if no sharding has it.
std::optional<TableSharding> parse_table_sharding(std::string_view name);
std::string table_sharding_names();  // all names, for messages

/// How one table is sharded.
struct TableRule {
  TableSharding sharding = TableSharding::table_wise;
  std::vector<int> ranks{};   // one for each shard; data_parallel uses all ranks instead
  int num_column_shards = 1;  // only for grid: the number of equal groups that `ranks` is cut into
};

/// Why a rule is invalid, in words for a message.
struct RuleProblem {
  std::string what;
  std::string expected;
  std::string found;
};
/// Returns why a rule cannot be used with `world_size` ranks; nothing if it can be used.
std::optional<RuleProblem> problem_of(const TableRule& rule, int world_size);

/// Which ranks hold which shard of each embedding table. As JSON, for example:
/// `{"schema": 1, "world_size": 4, "tables": {"t0": {"sharding": "row_wise", "ranks": [0, 1]}}}`
struct TablePlan {
  int world_size = 1;
  std::map<std::string, TableRule> tables;  // key: table name

  /// Throws: Error(corruption) that names `path`, the table, and the broken rule.
  static TablePlan from_json(std::string_view text, const std::string& path);
  /// Returns the plan in the JSON that from_json reads.
  std::string to_json() const;
};

/// Returns the table's name if `fqn` is `[<module>.]embedding_bags.<table>.weight` or
/// `[<module>.]embeddings.<table>.weight`, as torchrec names weights; nothing for any other name.
std::optional<std::string> table_of_weight(std::string_view fqn);

/// Returns which ranks hold which boxes of a table, cut as torch.chunk does, without empty boxes.
/// All ranks hold an empty table. Requires: problem_of returns nothing.
/// Shape: `shape` is `[rows, columns]`. Throws: Error(invalid_argument) unless it has 2 dimensions.
std::vector<Shard> table_shards(const TableRule& rule, std::span<const std::int64_t> shape,
                                int world_size);

}  // namespace tessera
