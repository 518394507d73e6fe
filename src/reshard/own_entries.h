#pragma once

#include <string>
#include <vector>

#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Gives ranks their own values, in formats that hold replicas. `per_rank.3.rng` is rank 3's own
/// value of the tensor `rng`: places `per_rank.3.rng` only on rank 3, and `rng` on all other ranks.
/// Leaves both unchanged if one of them is cut or is not on rank 3, if `rng` is on no other rank,
/// or if find_separate_own_entries lists `per_rank.3.rng`. Requires: the plan is sorted.
void place_own_entries(Plan& plan);

/// Returns the entries such as `per_rank.3.rng` for which there is no rank 3 or no entry `rng`, or
/// whose dict has other keys than the dict of `rng`. A format with replicas stores them on all
/// ranks, under this name.
std::vector<std::string> find_separate_own_entries(const formats::CheckpointContents& contents);

}  // namespace tessera::reshard
