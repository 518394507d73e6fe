#pragma once

#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Notes quantized weights whose codes and scales are separated by the move: a rename gives them
/// names that do not belong together any more, or a selection leaves one of them out. Adds at most
/// one note of each kind; none if the plan has problems, because tensors with problems are not in
/// it. Requires: the tensors of the plan are sorted.
void note_separated_parts(const formats::CheckpointContents& source, const Plan& plan,
                          PlanReport& report);

}  // namespace tessera::reshard
