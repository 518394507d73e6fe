#pragma once

#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Adds to `plan.changes` what plan_reshard cannot know, because only the values themselves tell it
/// (SimplifiedValues): that a value gets a plainer type. `reader`: the source. Adds nothing if the
/// plan has problems. Throws: as read_value.
void add_changes_of_values(Plan& plan, const formats::CheckpointReader& reader);

}  // namespace tessera::reshard
