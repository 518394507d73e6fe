#pragma once

#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Places tensors that single ranks have of their own (`per_rank.<rank>.<name>`) on their rank
/// alone, and leaves that rank out of the tensor `<name>`, if the destination has that rank and all
/// of `<name>` on each rank. For formats that hold replicas. Requires: the plan is sorted.
void place_own_entries(Plan& plan);

}  // namespace tessera::reshard
