#pragma once

#include <optional>
#include <span>
#include <vector>

#include "reshard/moved_names.h"
#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/layout/strategy.h"
#include "tessera/reshard/planner.h"

// Flat units (parameters that FSDP1 joins to one vector): which a move uses, and which it records.
namespace tessera::reshard {

/// Returns the flat units that a move uses, with parameter names of the source. They come from the
/// options or, if these give none, from the source. Reports units that do not fit the source's
/// tensors, and leaves them out. Throws: Error(invalid_argument) if the strategy needs units and
/// there are none.
std::vector<FlatUnit> choose_units(const formats::CheckpointContents& source,
                                   const PlanOptions& options,
                                   const std::optional<Strategy>& strategy, PlanReport& report);

/// Returns the units whose parameters are all moved, with their names and their dtype at the
/// destination.
std::vector<FlatUnit> units_at_destination(std::span<const FlatUnit> units,
                                           const PlanOptions& options,
                                           const MovedSelection& selection);

/// Removes the units with a parameter that is not at the destination because it cannot be moved.
/// Requires: the destination's tensors are sorted.
void remove_incomplete_units(formats::CheckpointContents& destination);

}  // namespace tessera::reshard
