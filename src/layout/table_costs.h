#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/layout/table_planner.h"

namespace tessera {

/// What a rank pays for one shard of a table; see [Note: What a shard costs].
struct ShardCost {
  std::uint64_t nbytes = 0;
  double seconds = 0;
};

/// One way to shard a table, before ranks are chosen. All hosts are alike, so costs do not depend
/// on which ranks those will be.
struct ShardingCandidate {
  TableSharding sharding = TableSharding::table_wise;
  int num_column_shards = 1;
  int num_hosts = 0;  // that its shards lie on, in equal parts and their order; 0: on any ranks
  std::vector<ShardCost> shards{};  // in the order of TableRule::ranks, the dearest one first

  std::uint64_t largest_nbytes() const { return shards.front().nbytes; }
  double largest_seconds() const { return shards.front().seconds; }
  std::uint64_t total_nbytes = 0;
  double total_seconds = 0;

  /// Returns `row_wise over 4 ranks`; of table_wise and data_parallel the name alone.
  std::string in_words() const;
};

/// Where a table's shards may lie.
struct AllowedRanks {
  std::vector<int> ranks{};  // ascending
  std::vector<int> hosts{};  // all of whose ranks are among them
};

/// Returns the ways in which a table may be sharded, those with least time of all ranks first.
/// Requires: sizes and options were checked. Throws: Error(invalid_argument) where there is none.
std::vector<ShardingCandidate> sharding_candidates(const TableSize& table,
                                                   const TableConstraint& constraint,
                                                   const AllowedRanks& allowed,
                                                   const PlannerOptions& options);

/// Returns what every rank needs for its own samples, however the table is sharded.
double batch_nbytes(const TableSize& table, const PlannerOptions& options);

/// Returns the bytes of a table's weights, gradient and optimizer state, as an estimate that cannot
/// overflow.
double table_nbytes(const TableSize& table);

int num_ranks_per_host(const PlannerOptions& options);

}  // namespace tessera
