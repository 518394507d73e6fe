#pragma once

#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Counts what is changed in the entries that a plan moves from `source` to `destination`, without
/// what the user asked for. Changes that do not happen are not in the list; the order is that of
/// FormatChange.
std::vector<FormatChangeCount> count_format_changes(const Plan& plan,
                                                    const formats::CheckpointContents& source,
                                                    formats::Format destination);

}  // namespace tessera::reshard
