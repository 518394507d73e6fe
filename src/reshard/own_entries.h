#pragma once

#include <string>
#include <vector>

#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Gives ranks their own values, in formats that hold replicas. `per_rank.3.rng` is rank 3's own
/// value of the tensor `rng`: places `per_rank.3.rng` only on rank 3, and `rng` on all other ranks.
/// Leaves both unchanged if one of them is cut or is not on rank 3, if `rng` is on no other rank,
/// or if the dict of `per_rank.3.rng` has other keys than that of `rng`. Requires: the plan is
/// sorted.
void place_own_entries(Plan& plan);

/// Returns the entries such as `per_rank.3.rng` for which there is no rank 3 or no entry `rng`,
/// whose dict has other keys than the dict of `rng`, or which place_own_entries has not placed. A
/// format with replicas stores them on all ranks, under this name.
std::vector<std::string> find_separate_own_entries(const formats::CheckpointContents& contents);

}  // namespace tessera::reshard
