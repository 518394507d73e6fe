#pragma once

#include <functional>
#include <string>

#include "tessera/runtime/dist/group.h"

namespace tessera::state {

/// Returns the `text` of rank `root` on all ranks; not used on other ranks. Collective over
/// `world`.
std::string broadcast_text(const std::string& text, dist::Group& world, int root = 0);

/// Calls `check`. If it throws on a rank, all ranks throw: the error of the lowest such rank, which
/// the error names unless it is rank 0. Collective over `world`; `check` must not be.
void check_on_all_ranks(dist::Group& world, const std::function<void()>& check);

}  // namespace tessera::state
