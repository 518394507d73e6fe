#pragma once

#include <set>
#include <vector>

#include "reshard/moved_names.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Counts the changes that the destination's format makes to the moved entries, such as dict keys
/// that become text. Also counts the changes that a merge of sources has made. Leaves out what the
/// user asked for, and kinds of change that do not happen. The order is that of FormatChange.
/// `renamed_keys` are paths in the source; each leads to a key that a rename has made text.
std::vector<FormatChangeCount> count_format_changes(const Plan& plan,
                                                    const formats::CheckpointContents& source,
                                                    const MovedSelection& selection,
                                                    const std::set<formats::KeyPath>& renamed_keys,
                                                    const PlanOptions& options);

}  // namespace tessera::reshard
