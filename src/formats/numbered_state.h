#pragma once

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Whether the path is that of optimizer state of a parameter that has a number instead of a name:
/// `optim`, `state`, 3, `exp_avg`. The first word of a name may be a number too (`3.weight`).
bool is_numbered_state(const KeyPath& path);

}  // namespace tessera::formats
