#pragma once

#include <string>
#include <vector>

#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// For formats that hold replicas: places each tensor `per_rank.<rank>.<name>` on its rank alone,
/// and the tensor `<name>` on the other ranks. Leaves both unchanged if one of them is cut or is
/// not on that rank, or if `<name>` is on no other rank. Requires: the plan is sorted.
void place_own_entries(Plan& plan);

/// Returns the entries `per_rank.<rank>.<name>` that a format with replicas stores under this name,
/// because there is no rank `<rank>` or no entry `<name>`. Requires: the contents are sorted.
std::vector<std::string> find_separate_own_entries(const formats::CheckpointContents& contents);

}  // namespace tessera::reshard
