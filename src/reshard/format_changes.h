#pragma once

#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Counts what changes in the entries that a plan moves from `source` to `destination`, except what
/// the user asked for. The list has only changes that happen, in the order of FormatChange.
std::vector<FormatChangeCount> count_format_changes(const Plan& plan,
                                                    const formats::CheckpointContents& source,
                                                    formats::Format destination);

}  // namespace tessera::reshard
