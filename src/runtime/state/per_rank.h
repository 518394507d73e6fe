#pragma once

#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/runtime/state/train_state.h"

namespace tessera::state {

std::string policy_name(PerRank policy);

/// Makes a rank's value from the saved values of `saved.size()` ranks, after the number of ranks
/// has changed. Requires: a policy other than refuse and drop. Throws: Error(mismatch) naming a
/// value with policy split that is not a list and has no Stateful::branch.
Value value_for(const std::string& name, const Stateful& object, PerRank policy,
                const std::vector<Value>& saved, int rank, int world_size);

}  // namespace tessera::state
