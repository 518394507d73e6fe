#pragma once

#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// For formats that hold replicas: places each tensor `per_rank.<rank>.<name>` on its rank alone,
/// and the tensor `<name>` on the other ranks. Leaves both unchanged if one of them is cut or is not
/// on that rank, or if `<name>` is on no other rank. Requires: the plan is sorted.
void place_own_entries(Plan& plan);

}  // namespace tessera::reshard
