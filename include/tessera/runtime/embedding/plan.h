#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/layout/table_planner.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/embedding/embedding_bag_collection.h"

namespace tessera {

inline namespace literals {
constexpr std::uint64_t operator""_MiB(unsigned long long value) {
  return value << 20;
}
constexpr std::uint64_t operator""_GiB(unsigned long long value) {
  return value << 30;
}
}  // namespace literals

namespace embedding {

/// What `plan` is to fit, and what it assumes about batches and machines.
struct PlanOptions {
  std::uint64_t memory_per_rank = 0;  // for tables, their state and a step's buffers; bytes
  std::int64_t batch_size = 1024;     // of one rank
  std::map<std::string, double> pooling_factors{};  // mean ids in a bag, by table; else 1
  std::optional<FusedOptimizer> optimizer{};        // whose state is counted; none: dense tables
  int ranks_per_host = 0;                           // 0: all are on one host
  std::map<std::string, TableConstraint> constraints{};  // by table
  PlannerBandwidths bandwidths{};                        // what times are estimated with
  std::uint64_t reserved = 0;  // of the memory, for everything but tables; bytes
  bool is_weighted = false;    // every id comes with a weight
};

/// Proposes a plan for the tables of a collection over the ranks of a mesh: see `propose_plan`,
/// which explains it and says what it throws. A function of the arguments alone; not collective.
ProposedPlan plan(const std::vector<EmbeddingBagConfig>& tables, const dist::Mesh& mesh,
                  const PlanOptions& options);

/// Returns the rules of some tables alone, for `shard`: one plan may be for several collections.
/// Throws: Error(mismatch) naming a table without a rule.
TablePlan part_of(const TablePlan& plan, const std::vector<EmbeddingBagConfig>& tables);

}  // namespace embedding
}  // namespace tessera
