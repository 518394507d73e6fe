#pragma once

#include <string>

#include "tessera/runtime/dist/group.h"

namespace tessera::state {

/// Returns rank 0's `text` on all ranks; not used on other ranks. Collective over `world`.
std::string broadcast_text(const std::string& text, dist::Group& world);

}  // namespace tessera::state
