#pragma once

#include <set>
#include <vector>

#include "reshard/moved_names.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Returns the kind of change that a move makes if the source's reader simplified something.
FormatChange change_of(formats::Simplification::Kind kind);

/// Counts, by kind, the changes that a move makes: those of the destination's format (dict keys
/// that become text), of the source's reader (Simplification) and of a merge (order of keys).
/// Returns only kinds that occur, in the order of FormatChange. `renamed_keys`: paths in the source
/// of keys that a rename has made text; they are also in FormatChangeCount::by_rename.
std::vector<FormatChangeCount> count_format_changes(const Plan& plan,
                                                    const formats::CheckpointContents& source,
                                                    const MovedSelection& selection,
                                                    const std::set<formats::KeyPath>& renamed_keys,
                                                    const PlanOptions& options);

}  // namespace tessera::reshard
