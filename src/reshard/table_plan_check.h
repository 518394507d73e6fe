#pragma once

#include <span>

#include "reshard/moved_names.h"
#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Checks that the table plan fits the source's tables. Reports rules for tables that the source
/// does not have, rules for tensors that are not 2-d, and different rules for the names of one
/// tensor (tied tables). Without a strategy, also reports moved tables that have no rule under any
/// of their names, because each would be copied to every rank.
void check_table_plan(const formats::CheckpointContents& source, const PlanOptions& options,
                      std::span<const MovedTensor> moved, PlanReport& report);

}  // namespace tessera::reshard
