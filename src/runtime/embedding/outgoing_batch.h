#pragma once

#include <cstdint>
#include <vector>

#include "runtime/embedding/input.h"

namespace tessera::embedding {

/// The ids of one output (one feature of a table) that this rank sends to `rank`, which has a shard
/// of that table.
struct Outgoing {
  const Assignment* assignment;
  TableBatch::Slice slice;
  int rank;
  std::int64_t begin = 0;  // index of its first id among all ids that `rank` gets
  std::int64_t num_ids = 0;
};

/// Returns what this rank sends of a batch, ordered by rank and then by output. Leaves `begin` and
/// `num_ids` at 0.
std::vector<Outgoing> outgoing_of(const TableBatch& batch, const Assignments& assignments);

/// Sets `begin` of each item to the number of ids that go to the same rank before it. Sets
/// `num_sent` to the number of ids for each rank. Requires: `num_ids` is set, `num_sent` is zero.
void sum_up(std::vector<Outgoing>& outgoing, std::vector<std::int64_t>& num_sent);

/// Sets `num_ids` of each item, for a batch in host memory.
void count_ids(const TableBatch& batch, std::vector<Outgoing>& outgoing);

/// Writes the second message (see Input) of a batch in host memory. `sizes`: the size of the
/// message to each rank. If `positions` is not null, it gets for each rank the positions in the
/// batch of the ids sent to it.
void pack(const TableBatch& batch, const std::vector<Outgoing>& outgoing,
          const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& num_sent,
          at::Tensor& message, std::vector<std::vector<std::int64_t>>* positions);

}  // namespace tessera::embedding
