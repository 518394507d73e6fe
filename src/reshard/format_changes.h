#pragma once

#include <set>
#include <vector>

#include "reshard/moved_names.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Counts what changes in the entries that a plan moves from `source` to `destination`, except what
/// the user asked for. The list has only changes that happen, in the order of FormatChange.
/// `renamed_keys` are paths in the source, each of a key that a rename has made text.
std::vector<FormatChangeCount> count_format_changes(const Plan& plan,
                                                    const formats::CheckpointContents& source,
                                                    const MovedSelection& selection,
                                                    const std::set<formats::KeyPath>& renamed_keys,
                                                    formats::Format destination);

}  // namespace tessera::reshard
