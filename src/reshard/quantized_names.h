#pragma once

#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Adds a note for each way in which a move separates the codes (stored elements) of quantized
/// weights from their scales: new names by which loaders do not find the pair, or a selection that
/// leaves one of the two out. Adds no note if the plan has problems, because tensors with problems
/// are not in the plan. Requires: the tensors of the plan are sorted.
void note_separated_parts(const formats::CheckpointContents& source, const Plan& plan,
                          PlanReport& report);

}  // namespace tessera::reshard
