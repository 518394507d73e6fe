#include "tessera/runtime/embedding/plan_tables.h"

#include <algorithm>

#include "runtime/embedding/fused_state.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

/// Adds the bytes of the optimizer's state to `size`.
void add_state(const FusedOptimizer& optimizer, TableSize& size) {
  for (const FusedState::Slot& slot : initial_state(optimizer, 0, 0).slots) {
    const bool is_row_wise = slot.kind == formats::StateKind::row_wise;
    (is_row_wise ? size.state_nbytes_per_row : size.state_nbytes_per_element) += sizeof(float);
  }
}

}  // namespace

ProposedPlan plan(const std::vector<EmbeddingBagConfig>& tables, const dist::Mesh& mesh,
                  const PlanOptions& options) {
  PlannerOptions planner;
  planner.world_size = mesh.world_size();
  planner.ranks_per_host = options.ranks_per_host;
  planner.memory_per_rank_nbytes = options.memory_per_rank;
  planner.reserved_nbytes = options.reserved;
  planner.batch_size = options.batch_size;
  planner.bandwidths = options.bandwidths;
  planner.constraints = options.constraints;
  for (const auto& [name, factor] : options.pooling_factors) {
    if (std::ranges::find(tables, name, &EmbeddingBagConfig::name) != tables.end()) continue;
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = name}, "pooling factor",
                          "a table of this name in the collection", "none");
  }
  std::vector<TableSize> sizes;
  for (const EmbeddingBagConfig& config : tables) {
    TableSize& size = sizes.emplace_back();
    size.name = config.name;
    size.rows = config.num_embeddings;
    size.columns = config.embedding_dim;
    size.dtype = dtype_of(config.dtype);
    size.is_weighted = options.is_weighted;
    size.num_features = static_cast<int>(config.feature_names.size());
    const auto factor = options.pooling_factors.find(config.name);
    if (factor != options.pooling_factors.end()) size.pooling_factor = factor->second;
    TableConstraint& constraint = planner.constraints[config.name];
    if (!options.optimizer) constraint.kernel = TableKernel::dense;
    if (constraint.kernel == TableKernel::dense) {
      size.state_nbytes_per_element = options.dense_state_nbytes_per_element;
    } else {
      add_state(*options.optimizer, size);
    }
  }
  return propose_plan(sizes, planner);
}

TablePlan rules_for(const TablePlan& plan, const std::vector<EmbeddingBagConfig>& tables) {
  TablePlan rules{plan.world_size, {}};
  for (const EmbeddingBagConfig& config : tables) {
    const auto rule = plan.tables.find(config.name);
    if (rule == plan.tables.end()) {
      throw Error::expected(ErrorKind::mismatch, {.fqn = config.name}, "plan for embedding tables",
                            "a rule for every table", "none for this table");
    }
    rules.tables.insert(*rule);
  }
  return rules;
}

}  // namespace tessera::embedding
