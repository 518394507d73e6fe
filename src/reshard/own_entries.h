#pragma once

#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// For formats that hold replicas: places each tensor `per_rank.<rank>.<name>` on its rank alone,
/// and the tensor `<name>` on all other ranks. Leaves both unchanged if the destination does not
/// have that rank, or does not have both tensors whole on all ranks. Requires: the plan is sorted.
void place_own_entries(Plan& plan);

}  // namespace tessera::reshard
