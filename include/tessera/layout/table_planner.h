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

/// An embedding table to plan.
struct TableSize {
  std::string name{};
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  DType dtype = DType::float32;
  int num_features = 1;                        // features that look the table up
  double pooling_factor = 1;                   // mean number of ids in a bag
  bool is_weighted = false;                    // every id has a weight
  std::uint64_t state_nbytes_per_row = 0;      // row-wise Adagrad: 4
  std::uint64_t state_nbytes_per_element = 0;  // Adagrad: 4, Adam: 8
  std::vector<std::string> other_names{};      // of a tied table; read_table_notes accepts any
};

/// How a table is updated. `fused`: row by row during the backward. `dense`: by an ordinary
/// optimizer, from a gradient as large as the shard. The planner takes `dense` for each
/// data_parallel table, which overestimates the table's cost.
enum class TableKernel { fused, dense };

/// What a plan may choose for one table.
struct TableConstraint {
  std::vector<TableSharding> shardings{};   // that the table may get; empty: any
  std::vector<int> ranks{};                 // that may hold the table; empty: any
  std::int64_t min_columns = 16;            // of each shard, if columns are cut
  TableKernel kernel = TableKernel::fused;  // how the table is updated
};

/// The bandwidth of one rank in one direction. Measure these on your machines. The defaults are
/// typical of CPU memory and of 10 Gbit/s Ethernet. Units: bytes per second.
struct PlannerBandwidths {
  double random_rows = 10e9;      // memory, at reads and writes of rows in random order
  double within_host = 10e9;      // link to a rank on the same host
  double between_hosts = 1.25e9;  // link to a rank on another host
};

/// The limits of a plan, and the assumptions of its estimates.
struct PlannerOptions {
  int world_size = 1;                        // ranks to distribute the tables over
  int ranks_per_host = 0;                    // divides world_size; 0: all are on one host
  std::uint64_t memory_per_rank_nbytes = 0;  // all memory of a rank
  std::uint64_t reserved_nbytes = 0;         // of this memory; for other things than tables
  std::int64_t batch_size = 1024;            // samples of one rank in one step
  PlannerBandwidths bandwidths{};            // to estimate times
  std::map<std::string, TableConstraint> constraints{};  // key: table name
};

/// The shard of one table on one rank, and its cost.
struct PlannedShard {
  int rank = 0;
  std::uint64_t nbytes = 0;  // weights, dense gradient, optimizer state, buffers of a step
  double seconds = 0;        // per step
};

/// The decision for one table.
struct PlannedTable {
  std::string name{};
  TableRule rule{};
  std::vector<PlannedShard> shards{};  // without empty shards
  std::string reason{};                // why the planner chose no other sharding
};

/// The cost of all tables on one rank.
struct PlannedRank {
  std::uint64_t nbytes = 0;  // of the rank's shards, plus ProposedPlan::common_nbytes
  double seconds = 0;        // per step
};

/// A plan with its estimates and reasons.
struct ProposedPlan {
  TablePlan plan{};
  std::vector<PlannedTable> tables{};        // sorted by name
  std::vector<PlannedRank> ranks{};          // by rank
  std::uint64_t memory_per_rank_nbytes = 0;  // as in PlannerOptions
  std::uint64_t common_nbytes = 0;  // on each rank: reserved bytes, and a batch's ids and outputs

  /// Returns a text: a line per table, a line per rank, and a summary. If a table's line exceeds
  /// `max_width` columns (0: no limit), reasons get own lines; if it still does, names are cut.
  std::string to_text(std::size_t max_width = 0) const;
  /// Returns everything as a JSON object (docs/cli/json-schema.md, ckpt-inspect plan).
  std::string to_json() const;
};

/// Proposes which rank holds which shard of each table, so that the slowest rank's step is short
/// and no rank exceeds its memory.
///
/// [Note: What a shard costs] In a step with `batch_size` samples on each of W ranks, a shard with
/// r of a table's R rows and c of its C columns has i = W * batch_size * features * pooling_factor
/// * r / R ids and b = W * batch_size * features bags. Its rank pays for
/// - rows: each id reads one row; the update reads and writes this row and its optimizer state, in
///   whole cache lines of 64 bytes. With a dense kernel, each id instead reads and writes a row of
///   the gradient, and the update is one pass over weights, gradient and state.
/// - links: from each other rank, the shard's rank receives that rank's ids for the shard (8 bytes
///   each, 12 if weighted) and 8 bytes per bag. It sends back 4 bytes per bag and column, and
///   receives a gradient of the same size. If a table is cut by rows, every shard sends sums of all
///   columns. If a table with row-wise state is cut by columns, each shard sends 4 bytes per id to
///   each other column shard.
/// - memory: weights, state, dense gradient (of a dtype of less than 4 bytes also its float32 sum);
///   a step's ids, outputs and their gradients.
/// With data_parallel, each rank looks up only its own samples, and an all-reduce of the gradient
/// moves 2 (W-1)/W times the table's bytes. The estimate adds all times, as if nothing overlapped,
/// and counts each id of a batch as a different row.
///
/// How the planner searches: it sets a limit for the time of each rank, and places one table after
/// the other. Each table gets the sharding with the least total time that keeps every rank within
/// the limit and within its memory, on the least loaded ranks. Bisection lowers the limit as long
/// as all tables find a place. The planner repeats this with other orders of tables and shardings.
/// Then it moves tables off the slowest rank as long as that helps. For up to 12 tables, it also
/// tries combinations of all shardings. Equal arguments give equal results. row_wise uses all ranks
/// that the table may use, table_row_wise and grid use whole hosts, and table_column_wise uses some
/// ranks of one host. The planner tries the last three if there are several hosts of several ranks;
/// otherwise only if a constraint lists them.
///
/// torchrec's planner has the same stages (enumerate, estimate, partition, explain), but differs in
/// costs and search (https://docs.pytorch.org/torchrec/planner-api-reference.html).
///
/// Collective: no. Throws:
/// - Error(invalid_argument) naming a table and its problem, an option, or a constraint that allows
///   no sharding;
/// - Error(mismatch) if the batch or the tables do not fit into the memory. The error names the
///   bytes that are needed and available, and up to ten tables.
/// Cost: 0.6 s for 1,000 tables on 128 ranks.
ProposedPlan propose_plan(std::span<const TableSize> tables, const PlannerOptions& options);

/// Reads notes about tables from JSON into `tables` and `options.constraints`. Every key of a table
/// is optional: `{"schema": 1, "tables": {"t0": {"features": 2, "pooling_factor": 12.5,
/// "weighted": true, "sharding": ["row_wise", "column_wise"], "ranks": [0, 1], "min_columns": 32,
/// "kernel": "dense"}}}`
/// Requires: `options.world_size` is set. Throws: Error(corruption) naming `path`, table and broken
/// rule, also if a table is not in `tables`, or if a tied table has notes under two of its names.
void read_table_notes(std::string_view json, const std::string& path, std::span<TableSize> tables,
                      PlannerOptions& options);

}  // namespace tessera
