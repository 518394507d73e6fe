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

/// The memory that a plan may use, and the batches, machines and optimizer that it assumes.
struct PlanOptions {
  std::uint64_t memory_per_rank = 0;  // bytes, for tables, optimizer state and a step's buffers
  std::int64_t batch_size = 1024;     // samples of one rank in one step
  std::map<std::string, double> pooling_factors{};       // mean ids in a bag, by table; default: 1
  std::optional<FusedOptimizer> optimizer{};             // of fused tables; empty: all are dense
  int ranks_per_host = 0;                                // 0: all ranks are on one host
  std::map<std::string, TableConstraint> constraints{};  // key: table name
  PlannerBandwidths bandwidths{};                        // to estimate times
  std::uint64_t reserved = 0;                            // bytes of memory_per_rank to leave free
  bool is_weighted = false;                              // every id has a weight
  /// How many bytes the torch::optim optimizer of dense tables keeps for each element. For a
  /// float32 table: 4 for SGD with momentum and for Adagrad, 8 for Adam.
  std::uint64_t dense_state_nbytes_per_element = 0;
};

/// Proposes a plan for tables over the ranks of a mesh. Throws as `propose_plan`, or if a pooling
/// factor names an unknown table. Not collective: equal arguments give equal plans.
ProposedPlan plan(const std::vector<EmbeddingBagConfig>& tables, const dist::Mesh& mesh,
                  const PlanOptions& options);

/// Returns the rules of `plan` for `tables`. One plan may cover several collections, but `shard`
/// takes only rules for its own tables. Throws: Error(mismatch) naming a table without a rule.
TablePlan rules_for(const TablePlan& plan, const std::vector<EmbeddingBagConfig>& tables);

}  // namespace embedding
}  // namespace tessera
