#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace tessera::reshard {

/// Chooses, among the ranks that hold a shard, the rank with the least to write so far; of several
/// such ranks, the lowest. The same calls in the same order choose the same ranks in every process.
class WriterBalance {
 public:
  explicit WriterBalance(int world_size) : nbytes_(static_cast<std::size_t>(world_size), 0) {
    for (int rank = 0; rank < world_size; ++rank) by_load_.emplace(0, rank);
  }

  /// Returns the chosen rank, and counts `nbytes` for it. Requires: `ranks` is not empty,
  /// ascending, below the world size.
  int choose(std::span<const int> ranks, std::uint64_t nbytes) {
    int chosen = ranks.front();
    if (ranks.size() == nbytes_.size()) {
      chosen = by_load_.begin()->second;
    } else {
      for (const int rank : ranks) {
        if (load_of(rank) < load_of(chosen)) chosen = rank;
      }
    }
    by_load_.erase({load_of(chosen), chosen});
    nbytes_[static_cast<std::size_t>(chosen)] += nbytes;
    by_load_.emplace(load_of(chosen), chosen);
    return chosen;
  }

 private:
  std::uint64_t load_of(int rank) const { return nbytes_[static_cast<std::size_t>(rank)]; }

  std::vector<std::uint64_t> nbytes_;
  std::set<std::pair<std::uint64_t, int>> by_load_;
};

}  // namespace tessera::reshard
