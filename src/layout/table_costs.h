#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/layout/table_planner.h"

namespace tessera {

/// The memory and the time of a step that one shard costs its rank; see [Note: What a shard costs].
struct ShardCost {
  std::uint64_t nbytes = 0;
  double seconds = 0;
};

/// One way to shard a table, before ranks are chosen. The planner treats all hosts as equal, so
/// costs do not depend on the ranks.
struct ShardingCandidate {
  TableSharding sharding = TableSharding::table_wise;
  int num_column_shards = 1;
  int num_hosts = 0;  // number of hosts that get equal parts of `shards`; 0: any ranks
  std::vector<ShardCost> shards{};  // in the order of TableRule::ranks, the most expensive first

  std::uint64_t largest_nbytes() const { return shards.front().nbytes; }
  double largest_seconds() const { return shards.front().seconds; }
  std::uint64_t total_nbytes = 0;
  double total_seconds = 0;

  /// Returns `row_wise over 4 ranks`; for table_wise and data_parallel only the name.
  std::string in_words() const;
};

/// The ranks that may hold a table's shards.
struct AllowedRanks {
  std::vector<int> ranks{};  // ascending
  std::vector<int> hosts{};  // hosts whose ranks are all allowed
};

/// Returns the possible shardings of a table, ordered by the total time of all ranks. Requires:
/// sizes and options were checked. Throws: Error(invalid_argument) if there is none.
std::vector<ShardingCandidate> sharding_candidates(const TableSize& table,
                                                   const TableConstraint& constraint,
                                                   const AllowedRanks& allowed,
                                                   const PlannerOptions& options);

/// Returns the bytes that each rank needs for its own samples; the sharding does not change them.
double batch_nbytes(const TableSize& table, const PlannerOptions& options);

/// Returns the bytes of a table's weights, gradient and optimizer state, as a double, because the
/// number may not fit into 64 bits.
double table_nbytes(const TableSize& table);

int num_ranks_per_host(const PlannerOptions& options);

}  // namespace tessera
