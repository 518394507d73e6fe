#pragma once

#include <optional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Whether this is the path of optimizer state of a parameter that has a number instead of a name:
/// `optim`, `state`, 3, `exp_avg`. The key must be an integer: a text such as "3" may be a name.
bool is_numbered_state(const KeyPath& path);
/// Returns the beginning that the names of all state of the same parameter have: `optim.state.3.`.
/// Returns nothing if this is no path of numbered state.
std::optional<std::string> front_of_numbered_state(const KeyPath& path);

/// Whether all pieces of a tensor are flat ranges, as those of FSDP1's flat optimizer state are.
bool has_only_flat_ranges(const TensorEntry& tensor);

}  // namespace tessera::formats
