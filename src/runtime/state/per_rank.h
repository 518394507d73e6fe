#pragma once

#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/runtime/state/train_state.h"

namespace tessera::state {

std::string policy_name(PerRank policy);

/// Returns what a rank gets of the values that `saved.size()` ranks had, where it is another number
/// of ranks now. Requires: a policy that gives it something. Throws: Error(mismatch) naming the
/// value where it is neither a list nor can be branched off (split).
Value value_for(const std::string& name, const Stateful& object, PerRank policy,
                const std::vector<Value>& saved, int rank, int world_size);

}  // namespace tessera::state
