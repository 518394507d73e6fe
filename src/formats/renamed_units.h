#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Replaces the flat units of `contents` by those of `source`, from which it is derived, with the
/// new names of their parameters. `new_name` returns nothing for a parameter that is gone, or that
/// is no longer one tensor. Leaves out units whose parameters are not in `contents` with their
/// shapes, or are in an earlier unit, and adds a note. Requires: `contents` has all tensors and
/// aliases.
void take_units(
    const CheckpointReader& source,
    const std::function<std::optional<std::string>(const std::string& parameter)>& new_name,
    CheckpointContents& contents);

}  // namespace tessera::formats
