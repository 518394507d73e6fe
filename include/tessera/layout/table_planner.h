#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/layout/table_plan.h"

namespace tessera {

/// What planning needs to know of an embedding table.
struct TableSize {
  std::string name{};
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  DType dtype = DType::float32;
  int num_features = 1;                        // that look up in it
  double pooling_factor = 1;                   // mean ids in a bag
  bool is_weighted = false;                    // every id comes with a weight
  std::uint64_t state_nbytes_per_row = 0;      // row-wise Adagrad: 4
  std::uint64_t state_nbytes_per_element = 0;  // Adagrad: 4, Adam: 8
};

/// How a table is updated: within the backward, row by row; or by an ordinary optimizer from a
/// gradient that is as large as the shard. A data_parallel table is counted as dense: never too
/// low.
enum class TableKernel { fused, dense };

/// What a table may be. The defaults leave everything open.
struct TableConstraint {
  std::vector<TableSharding> shardings{};  // empty: any
  std::vector<int> ranks{};                // that may hold it; empty: all
  std::int64_t min_columns = 16;           // of a shard, where columns are cut
  TableKernel kernel = TableKernel::fused;
};

/// What a rank reaches in one direction; to be measured where the plan is to run. The defaults are
/// of the order of a CPU's memory and of 10 Gbit/s Ethernet. Units: bytes per second.
struct PlannerBandwidths {
  double random_rows = 10e9;
  double within_host = 10e9;
  double between_hosts = 1.25e9;
};

/// What a plan has to fit, and what it is estimated with.
struct PlannerOptions {
  int world_size = 1;                        // ranks that the tables are for
  int ranks_per_host = 0;                    // divides world_size; 0: all are on one host
  std::uint64_t memory_per_rank_nbytes = 0;  // in all
  std::uint64_t reserved_nbytes = 0;         // of it, for everything but tables
  std::int64_t batch_size = 1024;            // samples of one rank in one step
  PlannerBandwidths bandwidths{};            // what times are estimated with
  std::map<std::string, TableConstraint> constraints{};  // by table name
};

/// What one rank has of one table.
struct PlannedShard {
  int rank = 0;
  std::uint64_t nbytes = 0;  // weights, gradient if dense, optimizer state, buffers of a step
  double seconds = 0;        // of a step
};

/// What was decided for one table.
struct PlannedTable {
  std::string name{};
  TableRule rule{};
  std::vector<PlannedShard> shards{};  // without those of no rows or columns
  std::string reason{};                // in words and numbers, why it is not sharded otherwise
};

/// What one rank has of all tables together.
struct PlannedRank {
  std::uint64_t nbytes = 0;  // of tables, and common_nbytes
  double seconds = 0;
};

/// A plan, and why it is as it is.
struct ProposedPlan {
  TablePlan plan{};
  std::vector<PlannedTable> tables{};  // by name
  std::vector<PlannedRank> ranks{};
  std::uint64_t memory_per_rank_nbytes = 0;
  std::uint64_t common_nbytes = 0;  // of every rank: reserved, and its own batch's ids and outputs

  /// Returns two tables for people, one line per table and one per rank. Where that makes lines
  /// longer than `max_width` columns (0: any), reasons stand on lines of their own.
  std::string to_text(std::size_t max_width = 0) const;
  /// Returns all of it as a JSON object (docs/cli/json-schema.md, ckpt-inspect plan).
  std::string to_json() const;
};

/// Proposes who holds what of each table, so that the slowest rank's step is short and every rank
/// has the memory.
///
/// [Note: What a shard costs] Of a step with `batch_size` samples on each of W ranks, a shard of
/// r of a table's R rows and c of its C columns has i = W * batch_size * features * pooling_factor
/// * r / R ids and b = W * batch_size * features bags. Its rank pays
/// - rows: of each id one row read, and read and written by the update, and as much of the state;
///   in whole cache lines of 64 bytes. Dense: the gradient's row instead, and one pass over
///   weights, gradient and state.
/// - links: from each other rank its share of the ids (8 bytes, weighted 12) and 8 bytes per bag;
///   to it, 4 bytes per bag and column, and the gradient as much back. A table that is cut by rows
///   sends sums of its full width from every shard. Row-wise state of a table that is cut by
///   columns: 4 bytes per id to each other column shard.
/// - memory: weights, state, gradient if dense; ids, outputs and their gradients of a step.
/// A data_parallel table is looked up for the rank's own samples, and all-reduced: 2 (W-1)/W times
/// its bytes. Times add up; nothing overlaps, and every id of a batch counts as a row of its own.
///
/// How: for a limit on a rank's time, each table in turn takes the sharding with least time of all
/// ranks together that keeps every rank within limit and memory, on the least loaded ranks. The
/// limit is lowered by bisection while that succeeds, for several orders of tables and choices;
/// then tables of the slowest rank are moved while that helps. Of up to 12 tables all shardings are
/// also tried with each other. The result is a function of the arguments alone. row_wise uses all
/// ranks that the table may use; table_row_wise, table_column_wise and grid take whole hosts, and
/// are only proposed where there are several, or where a constraint asks for them.
///
/// The parts (enumerate, estimate, partition, explain) are those of torchrec's planner
/// (https://docs.pytorch.org/torchrec/planner-api-reference.html); costs and search are not.
///
/// Collective: no. Throws: Error(invalid_argument) that names the table and what is wrong with it,
/// an option, or a constraint that leaves no way to shard it; Error(mismatch) where the tables do
/// not fit, with the bytes that are needed and there, and the tables.
/// Cost: 0.6 s for 1,000 tables on 128 ranks.
ProposedPlan propose_plan(std::span<const TableSize> tables, const PlannerOptions& options);

/// Sets features, pooling factor, weights and constraints of tables from JSON, all of it optional:
/// `{"schema": 1, "tables": {"t0": {"features": 2, "pooling_factor": 12.5, "weighted": true,
/// "sharding": ["row_wise", "column_wise"], "ranks": [0, 1], "min_columns": 32,
/// "kernel": "dense"}}}`
/// Throws: Error(corruption) that names `path`, the table and the broken rule; also for a table
/// that is not among `tables`.
void read_table_notes(std::string_view json, const std::string& path, std::span<TableSize> tables,
                      PlannerOptions& options);

}  // namespace tessera
