#include "tessera/layout/table_planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "base/json.h"
#include "base/size_text.h"
#include "layout/table_json.h"
#include "layout/table_reasons.h"
#include "layout/table_search.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

// With these limits, sums of costs over all ranks fit into 64 bits.
constexpr int kMostRanks = 4096;
constexpr double kMostNbytes = 0x1p50;  // of a table; also of one step's ids and outputs
constexpr std::uint64_t kMostStateNbytes = 1 << 20;
constexpr std::size_t kMostTablesNamed = 10;

Error refusal(const std::string& table, std::string_view rule, std::string_view expected,
              std::string_view found) {
  return Error::expected(ErrorKind::invalid_argument, {.fqn = table}, rule, expected, found);
}

std::string number_text(double number) {
  return value_to_string(Value(number));
}

/// Formats a sum of bytes that may exceed 64 bits.
std::string sum_text(double nbytes) {
  return nbytes < 0x1p63 ? exact_size(static_cast<std::uint64_t>(nbytes))
                         : number_text(nbytes) + " bytes";
}

void check_bandwidth(std::string_view name, double bandwidth) {
  if (std::isfinite(bandwidth) && bandwidth > 0) return;
  throw refusal("", name, "bytes per second, more than 0", number_text(bandwidth));
}

void check_options(const PlannerOptions& options) {
  if (options.world_size < 1 || options.world_size > kMostRanks) {
    throw refusal("", "world size", "1 to " + std::to_string(kMostRanks),
                  std::to_string(options.world_size));
  }
  if (options.ranks_per_host < 0 || options.world_size % num_ranks_per_host(options) != 0) {
    throw refusal(
        "", "ranks per host",
        "a divisor of the " + counted(static_cast<std::uint64_t>(options.world_size), "rank"),
        std::to_string(options.ranks_per_host));
  }
  if (options.batch_size < 1) {
    throw refusal("", "batch size", "1 or more", std::to_string(options.batch_size));
  }
  check_bandwidth("bandwidth of random rows", options.bandwidths.random_rows);
  check_bandwidth("bandwidth within a host", options.bandwidths.within_host);
  check_bandwidth("bandwidth between hosts", options.bandwidths.between_hosts);
}

void check_nbytes(const std::string& table, std::string_view what, double nbytes) {
  if (nbytes <= kMostNbytes) return;
  throw refusal(table, what, "at most " + iec_size(static_cast<std::uint64_t>(kMostNbytes)),
                sum_text(nbytes));
}

void check_table(const TableSize& table, const PlannerOptions& options) {
  const auto check_at_least = [&](std::string_view what, std::int64_t number, std::int64_t least) {
    if (number >= least) return;
    throw refusal(table.name, what, std::to_string(least) + " or more", std::to_string(number));
  };
  check_at_least("rows", table.rows, 0);
  check_at_least("columns", table.columns, 0);
  check_at_least("features", table.num_features, 1);
  if (!std::isfinite(table.pooling_factor) || table.pooling_factor < 0) {
    throw refusal(table.name, "pooling factor", "a number of 0 or more",
                  number_text(table.pooling_factor));
  }
  for (const std::uint64_t nbytes : {table.state_nbytes_per_row, table.state_nbytes_per_element}) {
    if (nbytes <= kMostStateNbytes) continue;
    throw refusal(table.name, "optimizer state of a row or an element",
                  "at most " + exact_size(kMostStateNbytes), exact_size(nbytes));
  }
  check_nbytes(table.name, "table", table_nbytes(table));
  check_nbytes(table.name, "ids and outputs of a step",
               batch_nbytes(table, options) * options.world_size);
}

void check_constraint(const std::string& table, const TableConstraint& constraint,
                      const PlannerOptions& options) {
  if (constraint.min_columns < 1) {
    throw refusal(table, "constraint min_columns", "1 or more",
                  std::to_string(constraint.min_columns));
  }
  std::set<int> ranks;
  for (const int rank : constraint.ranks) {
    if (rank < 0 || rank >= options.world_size) {
      throw refusal(table, "constraint ranks",
                    "ranks from 0 to " + std::to_string(options.world_size - 1),
                    std::to_string(rank));
    }
    if (!ranks.insert(rank).second) {
      throw refusal(table, "constraint ranks", "each rank once", std::to_string(rank) + " twice");
    }
  }
}

AllowedRanks allowed_ranks(const TableConstraint& constraint, const PlannerOptions& options) {
  AllowedRanks allowed;
  allowed.ranks = constraint.ranks;
  if (allowed.ranks.empty()) {
    allowed.ranks.resize(static_cast<std::size_t>(options.world_size));
    std::iota(allowed.ranks.begin(), allowed.ranks.end(), 0);
  }
  std::sort(allowed.ranks.begin(), allowed.ranks.end());
  const int ranks_per_host = num_ranks_per_host(options);
  std::map<int, int> num_allowed_of_host;
  for (const int rank : allowed.ranks) ++num_allowed_of_host[rank / ranks_per_host];
  for (const auto& [host, num_allowed] : num_allowed_of_host) {
    if (num_allowed == ranks_per_host) allowed.hosts.push_back(host);
  }
  return allowed;
}

std::vector<PlannerTable> tables_by_name(std::span<const TableSize> sizes,
                                         const PlannerOptions& options) {
  std::map<std::string, const TableSize*> by_name;
  for (const TableSize& size : sizes) {
    check_table(size, options);
    if (size.name.empty()) throw refusal("", "table", "a name", "an empty name");
    if (!by_name.emplace(size.name, &size).second) {
      throw refusal(size.name, "table", "one table of this name", "two");
    }
  }
  for (const auto& [name, constraint] : options.constraints) {
    if (!by_name.contains(name)) throw refusal(name, "constraint", "a table of that name", "none");
    check_constraint(name, constraint, options);
  }
  std::vector<PlannerTable> tables;
  for (const auto& [name, size] : by_name) {
    const auto constraint = options.constraints.find(name);
    PlannerTable table{.size = *size};
    if (constraint != options.constraints.end()) table.constraint = constraint->second;
    table.allowed = allowed_ranks(table.constraint, options);
    table.candidates = sharding_candidates(table.size, table.constraint, table.allowed, options);
    tables.push_back(std::move(table));
  }
  return tables;
}

/// Returns the bytes that each rank needs in addition to its tables. Throws: Error(mismatch) if a
/// rank has less memory.
std::uint64_t common_nbytes(std::span<const PlannerTable> tables, const PlannerOptions& options) {
  double batch = 0;
  for (const PlannerTable& table : tables) batch += batch_nbytes(table.size, options);
  const std::uint64_t memory = options.memory_per_rank_nbytes;
  const std::uint64_t reserved = options.reserved_nbytes;
  batch = std::ceil(batch);
  if (batch < 0x1p62 && reserved <= memory &&
      static_cast<std::uint64_t>(batch) <= memory - reserved) {
    return reserved + static_cast<std::uint64_t>(batch);
  }
  throw Error::expected(ErrorKind::mismatch, {}, "memory of a rank",
                        sum_text(static_cast<double>(reserved) + batch) + " or more, of which " +
                            exact_size(reserved) +
                            " are reserved and the rest is for the batch of the rank",
                        exact_size(memory), "use a smaller batch?");
}

/// Explains why tables do not fit: gives the most obvious reason that holds.
class Misfit {
 public:
  Misfit(std::span<const PlannerTable> tables, const PlannerMachine& machine)
      : tables_(tables), machine_(machine) {}

  Error error() const {
    if (auto error = too_large_tables()) return *error;
    if (auto error = too_little_in_all()) return *error;
    return no_packing();
  }

 private:
  struct Need {
    const PlannerTable* table;
    const ShardingCandidate* candidate;
    std::uint64_t nbytes;
  };

  template <class Measure>
  static Need least(const PlannerTable& table, Measure measure) {
    const auto it =
        std::min_element(table.candidates.begin(), table.candidates.end(),
                         [&](const auto& a, const auto& b) { return measure(a) < measure(b); });
    return {&table, &*it, measure(*it)};
  }
  static Need least_shard(const PlannerTable& table) {
    return least(table, [](const ShardingCandidate& c) { return c.largest_nbytes(); });
  }

  static std::string line(const Need& need, std::string_view what) {
    return printable(need.table->size.name) + ": " + std::string(what) + " " +
           exact_size(need.nbytes) + ", " + need.candidate->in_words();
  }

  static Error error_of(const std::string& what, std::vector<Need> needs,
                        std::string_view measure) {
    std::stable_sort(needs.begin(), needs.end(),
                     [](const Need& a, const Need& b) { return a.nbytes > b.nbytes; });
    std::string lines;
    for (std::size_t i = 0; i < std::min(needs.size(), kMostTablesNamed); ++i) {
      lines += (i > 0 ? "\n" : "") + line(needs[i], measure);
    }
    if (needs.size() > kMostTablesNamed) {
      lines += "\nand " + std::to_string(needs.size() - kMostTablesNamed) + " more";
    }
    return Error::listing(ErrorKind::mismatch, {}, what, lines);
  }

  std::optional<Error> too_large_tables() const {
    std::vector<Need> needs;
    for (const PlannerTable& table : tables_) {
      const Need need = least_shard(table);
      if (need.nbytes > machine_.capacity_nbytes) needs.push_back(need);
    }
    if (needs.empty()) return std::nullopt;
    const std::string num_tables = counted(needs.size(), "table");
    return error_of(
        "memory of a rank: expected shards of at most " + exact_size(machine_.capacity_nbytes) +
            " (the memory of a rank for tables), found " + num_tables + " with larger shards only",
        std::move(needs), "smallest shard");
  }

  std::optional<Error> too_little_in_all() const {
    std::vector<Need> needs;
    double needed = 0;
    for (const PlannerTable& table : tables_) {
      needs.push_back(least(table, [](const ShardingCandidate& c) { return c.total_nbytes; }));
      needed += static_cast<double>(needs.back().nbytes);
    }
    const double there = static_cast<double>(machine_.capacity_nbytes) * machine_.world_size;
    if (needed <= there) return std::nullopt;
    return error_of("memory of all ranks: expected tables of at most " + sum_text(there) +
                        " in total, " + exact_size(machine_.capacity_nbytes) + " on each of " +
                        counted(static_cast<std::uint64_t>(machine_.world_size), "rank") +
                        ", found tables of at least " + sum_text(needed),
                    std::move(needs), "at least");
  }

  Error no_packing() const {
    const Assignment placed = place_what_fits(tables_, machine_);
    std::vector<Need> needs;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      if (!placed.choice(t)) needs.push_back(least_shard(tables_[t]));
    }
    std::uint64_t most_left = 0;
    double left_in_all = 0;
    for (const ShardCost& load : placed.loads()) {
      most_left = std::max(most_left, machine_.capacity_nbytes - load.nbytes);
      left_in_all += static_cast<double>(machine_.capacity_nbytes - load.nbytes);
    }
    const std::string num_tables = counted(needs.size(), "table");
    return error_of("memory of the ranks: expected room for every table, found " + num_tables +
                        " without room; " + sum_text(left_in_all) +
                        " are free on all ranks together, and at most " + exact_size(most_left) +
                        " on one rank (do constraints exclude ranks?)",
                    std::move(needs), "smallest shard");
  }

  std::span<const PlannerTable> tables_;
  const PlannerMachine& machine_;
};

TableRule rule_of(const ShardingCandidate& candidate, const std::vector<int>& ranks) {
  TableRule rule{.sharding = candidate.sharding, .ranks = ranks};
  if (candidate.sharding == TableSharding::grid) {
    rule.num_column_shards = candidate.num_column_shards;
  }
  return rule;
}

PlannedTable planned_table(const Assignment& assignment, std::size_t t,
                           const PlannerMachine& machine) {
  const ShardingCandidate& candidate = assignment.chosen(t);
  const std::vector<int>& ranks = assignment.choice(t)->ranks;
  PlannedTable table{.name = assignment.tables()[t].size.name,
                     .rule = rule_of(candidate, ranks),
                     .reason = reason_of(assignment, t, machine)};
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const ShardCost& shard = candidate.shards[i];
    if (shard.nbytes > 0) table.shards.push_back({ranks[i], shard.nbytes, shard.seconds});
  }
  return table;
}

ProposedPlan proposed_plan(const Assignment& assignment, const PlannerMachine& machine,
                           std::uint64_t common) {
  ProposedPlan proposed;
  proposed.plan.world_size = machine.world_size;
  proposed.memory_per_rank_nbytes = machine.capacity_nbytes + common;
  proposed.common_nbytes = common;
  proposed.ranks.assign(static_cast<std::size_t>(machine.world_size), {common, 0});
  for (std::size_t t = 0; t < assignment.tables().size(); ++t) {
    PlannedTable table = planned_table(assignment, t, machine);
    for (const PlannedShard& shard : table.shards) {
      PlannedRank& rank = proposed.ranks[static_cast<std::size_t>(shard.rank)];
      rank.nbytes += shard.nbytes;
      rank.seconds += shard.seconds;
    }
    proposed.plan.tables[table.name] = table.rule;
    proposed.tables.push_back(std::move(table));
  }
  return proposed;
}

}  // namespace

ProposedPlan propose_plan(std::span<const TableSize> sizes, const PlannerOptions& options) {
  check_options(options);
  const std::vector<PlannerTable> tables = tables_by_name(sizes, options);
  const std::uint64_t common = common_nbytes(tables, options);
  const PlannerMachine machine{.world_size = options.world_size,
                               .ranks_per_host = num_ranks_per_host(options),
                               .capacity_nbytes = options.memory_per_rank_nbytes - common};
  const auto assignment = find_assignment(tables, machine);
  if (!assignment) throw Misfit(tables, machine).error();
  return proposed_plan(*assignment, machine, common);
}

void read_table_notes(std::string_view text, const std::string& path, std::span<TableSize> tables,
                      PlannerOptions& options) {
  TableJson json(path, "notes about tables");
  const Value file = parse_json(text, path);
  json.refuse_unknown_keys(file, {"schema", "tables"});
  std::map<const TableSize*, std::string> noted;  // the name in the notes
  for (const auto& [name, notes] : json.tables(file)) {
    const std::string& table = *name.get_if<std::string>();
    json.at_table(table);
    const auto size = std::ranges::find_if(tables, [&](const TableSize& each) {
      return each.name == table ||
             std::ranges::find(each.other_names, table) != each.other_names.end();
    });
    if (size == tables.end()) throw json.refusal("tables", "a table of that name", "none");
    const auto [first, is_first] = noted.emplace(&*size, table);
    if (!is_first) {
      throw json.refusal("tables", "notes for only one of the names of a tied table",
                         "also notes for " + printable(first->second));
    }
    json.refuse_unknown_keys(notes, {"features", "pooling_factor", "weighted", "sharding", "ranks",
                                     "min_columns", "kernel"});
    constexpr auto kMostInt = std::numeric_limits<int>::max();
    if (const Value* features = notes.find("features")) {
      size->num_features = static_cast<int>(json.integer(*features, "features", 1, kMostInt));
    }
    if (const Value* pooling = notes.find("pooling_factor")) {
      size->pooling_factor = json.number_from_zero(*pooling, "pooling_factor");
    }
    if (const Value* weighted = notes.find("weighted")) {
      size->is_weighted = json.truth(*weighted, "weighted");
    }
    TableConstraint& constraint = options.constraints[size->name];
    if (const Value* shardings = notes.find("sharding")) {
      for (const Value& each : json.list(*shardings, "sharding", "a list of sharding types")) {
        constraint.shardings.push_back(json.sharding(each));
      }
    }
    if (const Value* ranks = notes.find("ranks")) {
      constraint.ranks = json.ranks(*ranks, options.world_size);
    }
    if (const Value* columns = notes.find("min_columns")) {
      constraint.min_columns = json.integer(*columns, "min_columns", 1, kMostInt);
    }
    if (const Value* kernel = notes.find("kernel")) {
      const auto* word = kernel->get_if<std::string>();
      if (word == nullptr || (*word != "fused" && *word != "dense")) {
        throw json.refusal("kernel", "fused or dense", value_to_string(*kernel));
      }
      constraint.kernel = *word == "dense" ? TableKernel::dense : TableKernel::fused;
    }
  }
}

}  // namespace tessera
