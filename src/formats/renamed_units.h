#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Replaces the flat units of `contents`, which was made from `source`, by those of `source` with
/// the new names of their parameters. `new_name` returns nothing for a parameter that is gone or
/// has become several tensors. Leaves out a unit, and counts it in a note, if one of its parameters
/// has no tensor of the same shape in `contents`, or is in an earlier unit, kept or not.
/// Requires: `contents` has all tensors and aliases, sorted.
void take_units(
    const CheckpointReader& source,
    const std::function<std::optional<std::string>(const std::string& parameter)>& new_name,
    CheckpointContents& contents);

}  // namespace tessera::formats
