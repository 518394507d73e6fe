#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "property/generators.h"
#include "tessera/base/error.h"
#include "tessera/layout/table_planner.h"

namespace tessera {
namespace {

using test::pick;

constexpr TableSharding kShardings[] = {
    TableSharding::data_parallel, TableSharding::table_wise,     TableSharding::column_wise,
    TableSharding::row_wise,      TableSharding::table_row_wise, TableSharding::table_column_wise,
    TableSharding::grid,
};

std::vector<TableSize> arbitrary_tables() {
  std::vector<TableSize> tables;
  const std::int64_t num_tables = pick(0, 3) == 0 ? pick(0, 14) : pick(0, 4);
  for (std::int64_t t = 0; t < num_tables; ++t) {
    TableSize table;
    table.name = "t" + std::to_string(t);
    table.rows = pick(0, 1) == 0 ? pick(0, 20) : pick(0, 200'000);
    table.columns = pick(0, 1) == 0 ? pick(0, 40) : 16 * pick(1, 16);
    table.dtype = pick(0, 1) == 0 ? DType::float32 : DType::bfloat16;
    table.num_features = static_cast<int>(pick(1, 3));
    table.pooling_factor = static_cast<double>(pick(0, 100)) / 4;
    table.is_weighted = pick(0, 1) == 1;
    table.state_nbytes_per_row = static_cast<std::uint64_t>(4 * pick(0, 1));
    table.state_nbytes_per_element = static_cast<std::uint64_t>(4 * pick(0, 2));
    tables.push_back(table);
  }
  return tables;
}

TableConstraint arbitrary_constraint(int world_size) {
  TableConstraint constraint;
  for (const TableSharding sharding : kShardings) {
    if (pick(0, 3) == 0) constraint.shardings.push_back(sharding);
  }
  // table_wise is always possible; without it many constraints would contradict each other.
  if (pick(0, 3) > 0) constraint.shardings.push_back(TableSharding::table_wise);
  if (pick(0, 2) == 0) {
    for (int rank = 0; rank < world_size; ++rank) {
      if (pick(0, 2) > 0) constraint.ranks.push_back(rank);
    }
  }
  constraint.min_columns = pick(1, 24);
  constraint.kernel = pick(0, 3) == 0 ? TableKernel::dense : TableKernel::fused;
  return constraint;
}

PlannerOptions arbitrary_options(const std::vector<TableSize>& tables) {
  PlannerOptions options;
  options.ranks_per_host = static_cast<int>(pick(1, 4));
  options.world_size = options.ranks_per_host * static_cast<int>(pick(1, 3));
  options.batch_size = pick(1, 256);
  options.reserved_nbytes = static_cast<std::uint64_t>(pick(0, 1000));
  options.memory_per_rank_nbytes = std::uint64_t{1} << pick(16, 32);
  for (const TableSize& table : tables) {
    if (pick(0, 7) == 0) {
      options.constraints[table.name] = arbitrary_constraint(options.world_size);
    }
  }
  return options;
}

/// Checks the shards that a table's rule makes, not how the planner found the rule.
void check_table(const TableSize& size, const PlannedTable& planned, const PlannerOptions& options,
                 std::vector<std::uint64_t>& kept_nbytes) {
  const Shape shape{size.rows, size.columns};
  std::vector<Region> regions;
  for (const Shard& shard : table_shards(planned.rule, shape, options.world_size)) {
    regions.push_back(shard.region);
    const Box& box = std::get<Box>(shard.region);
    const std::uint64_t nbytes_of_element = itemsize(size.dtype) + size.state_nbytes_per_element;
    for (const int rank : shard.ranks) {
      kept_nbytes[static_cast<std::size_t>(rank)] +=
          static_cast<std::uint64_t>(box.numel()) * nbytes_of_element;
    }
  }
  RC_ASSERT(check_coverage(regions, shape).empty());

  const auto constraint = options.constraints.find(size.name);
  if (constraint == options.constraints.end()) return;
  const auto& [shardings, ranks, min_columns, kernel] = constraint->second;
  RC_ASSERT(shardings.empty() || std::find(shardings.begin(), shardings.end(),
                                           planned.rule.sharding) != shardings.end());
  for (const int rank : planned.rule.ranks) {
    RC_ASSERT(ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end());
  }
}

/// Checks that table_row_wise, table_column_wise and grid use one host or whole hosts as they must.
void check_hosts(const TableRule& rule, int ranks_per_host) {
  std::map<int, int> num_ranks_of_host;
  for (const int rank : rule.ranks) ++num_ranks_of_host[rank / ranks_per_host];
  if (rule.sharding == TableSharding::table_row_wise ||
      rule.sharding == TableSharding::table_column_wise) {
    RC_ASSERT(num_ranks_of_host.size() == 1U);
  }
  if (rule.sharding == TableSharding::table_row_wise || rule.sharding == TableSharding::grid) {
    for (const auto& [host, num_ranks] : num_ranks_of_host) RC_ASSERT(num_ranks == ranks_per_host);
  }
}

// Shows D10.
RC_GTEST_PROP(TablePlannerLaws, EveryPlanFitsCoversEachTableOnceAndIsDeterministic, ()) {
  std::vector<TableSize> tables = arbitrary_tables();
  const PlannerOptions options = arbitrary_options(tables);
  ProposedPlan proposed;
  try {
    proposed = propose_plan(tables, options);
  } catch (const Error& error) {
    RC_ASSERT(error.kind() == ErrorKind::mismatch || error.kind() == ErrorKind::invalid_argument);
    RC_ASSERT(error.kind() == ErrorKind::mismatch || !options.constraints.empty());
    RC_TAG("refused");
    return;
  }
  RC_ASSERT(proposed.tables.size() == tables.size());
  RC_ASSERT(proposed.plan.tables.size() == tables.size());
  std::vector<std::uint64_t> kept_nbytes(static_cast<std::size_t>(options.world_size));
  for (const TableSize& size : tables) {
    const auto planned =
        std::find_if(proposed.tables.begin(), proposed.tables.end(),
                     [&](const PlannedTable& each) { return each.name == size.name; });
    RC_ASSERT(planned != proposed.tables.end());
    check_table(size, *planned, options, kept_nbytes);
    check_hosts(planned->rule, options.ranks_per_host);
    RC_ASSERT(!planned->reason.empty());
  }
  for (std::size_t rank = 0; rank < kept_nbytes.size(); ++rank) {
    RC_ASSERT(kept_nbytes[rank] + proposed.common_nbytes <= proposed.ranks[rank].nbytes);
    RC_ASSERT(proposed.ranks[rank].nbytes <= options.memory_per_rank_nbytes);
  }
  const std::string plan = proposed.plan.to_json();
  RC_ASSERT(TablePlan::from_json(plan, "plan").to_json() == plan);
  std::reverse(tables.begin(), tables.end());
  RC_ASSERT(propose_plan(tables, options).to_json() == proposed.to_json());
}

}  // namespace
}  // namespace tessera
