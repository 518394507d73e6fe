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

/// The limits of a plan, and the sizes of batches and machines that it is made for.
struct PlanOptions {
  std::uint64_t memory_per_rank = 0;  // bytes, for tables, optimizer state and a step's buffers
  std::int64_t batch_size = 1024;     // of one rank
  std::map<std::string, double> pooling_factors{};       // mean ids in a bag, by table; else 1
  std::optional<FusedOptimizer> optimizer{};             // to count its state; empty: dense tables
  int ranks_per_host = 0;                                // 0: all ranks on one host
  std::map<std::string, TableConstraint> constraints{};  // key: table
  PlannerBandwidths bandwidths{};                        // to estimate times
  std::uint64_t reserved = 0;                            // bytes of memory_per_rank to leave free
  bool is_weighted = false;                              // every id has a weight
  /// The bytes that an optimizer of torch::optim keeps for each element of a dense table: of a
  /// float32 table 4 for SGD with momentum or Adagrad, 8 for Adam.
  std::uint64_t dense_state_nbytes_per_element = 0;
};

/// Proposes a plan for the tables of a collection over the ranks of a mesh. See `propose_plan`.
/// Throws as `propose_plan`. Equal arguments give equal plans. Not collective.
ProposedPlan plan(const std::vector<EmbeddingBagConfig>& tables, const dist::Mesh& mesh,
                  const PlanOptions& options);

/// Returns the rules for `tables` only. Pass them to `shard` if one plan covers several
/// collections. Throws: Error(mismatch) naming a table without a rule.
TablePlan rules_for(const TablePlan& plan, const std::vector<EmbeddingBagConfig>& tables);

}  // namespace embedding
}  // namespace tessera
