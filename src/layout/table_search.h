#pragma once

#include <optional>
#include <span>
#include <vector>

#include "layout/table_costs.h"

namespace tessera {

/// A table and all ways to shard it.
struct PlannerTable {
  TableSize size{};
  TableConstraint constraint{};
  AllowedRanks allowed{};
  std::vector<ShardingCandidate> candidates{};  // sorted by the total time of all ranks
};

/// The decision about a table.
struct Choice {
  std::size_t candidate = 0;  // index in PlannerTable::candidates
  std::vector<int> ranks{};   // one rank for each shard of the candidate
};

/// The limits of the search, besides the constraints of the tables.
struct PlannerMachine {
  int world_size = 1;
  int ranks_per_host = 1;
  std::uint64_t capacity_nbytes = 0;  // of a rank, for tables
};

/// Which ranks to use first: those with the least time, the least memory in use, or the least free
/// memory. `fullest_first` leaves room on other ranks for large shards.
enum class LoadOrder { by_seconds, by_nbytes, fullest_first };

/// On which ranks the search has placed each table so far, and what the tables cost each rank.
class Assignment {
 public:
  /// Keeps a view of `tables`, which must outlive this object.
  Assignment(std::span<const PlannerTable> tables, const PlannerMachine& machine);

  /// Returns the first ranks in `order` that can take the candidate's shards: the time of each
  /// stays within `limit_seconds`, and it has the memory. Nothing if too few ranks can.
  std::optional<Choice> find_ranks(std::size_t table, std::size_t candidate, double limit_seconds,
                                   LoadOrder order) const;
  /// Puts a table on ranks. Requires: it is on none.
  void put(std::size_t table, Choice choice);
  /// Removes a table from its ranks. Requires: it is on some.
  void take(std::size_t table);

  const std::optional<Choice>& choice(std::size_t table) const { return choices_[table]; }
  const ShardingCandidate& chosen(std::size_t table) const {
    return tables_[table].candidates[choices_[table]->candidate];
  }
  std::span<const ShardCost> loads() const { return loads_; }
  int slowest_rank() const;
  std::span<const PlannerTable> tables() const { return tables_; }

  /// Smaller is better: first the slowest rank's time, then the sum of the squares of all ranks'
  /// times, which grows with total work and imbalance.
  struct Score {
    double slowest_seconds = 0;
    double squares = 0;
    /// Returns whether this score is better than `other` by more than 0.1 %.
    bool is_better_than(const Score& other) const;
  };
  Score score() const;

 private:
  double load_of(int rank, LoadOrder order) const;
  bool fits(int rank, const ShardCost& shard, double limit_seconds) const;
  std::vector<int> pick(std::vector<int> ranks, std::span<const ShardCost> shards,
                        double limit_seconds, LoadOrder order) const;
  std::vector<int> pick_hosts(const AllowedRanks& allowed, const ShardingCandidate& candidate,
                              double limit_seconds, LoadOrder order) const;

  std::span<const PlannerTable> tables_;
  PlannerMachine machine_;
  std::vector<std::optional<Choice>> choices_;
  std::vector<ShardCost> loads_;  // indexed by rank
};

/// Returns the best assignment that the search finds; nothing if it finds none.
std::optional<Assignment> find_assignment(std::span<const PlannerTable> tables,
                                          const PlannerMachine& machine);

/// Places as many tables as the search can, with no limit on time; the others get no Choice.
Assignment place_what_fits(std::span<const PlannerTable> tables, const PlannerMachine& machine);

}  // namespace tessera
