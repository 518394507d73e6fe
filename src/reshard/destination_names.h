#pragma once

#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// Makes the names of a destination valid: sorted, unique, and no alias without its tensor.
namespace tessera::reshard {

/// Sorts tensors, values and aliases by name. Lists of the plan that are parallel to these lists,
/// such as `copies`, get the same order.
void sort_by_name(Plan& plan);

/// Reports each name that several entries have, and an empty name that a rename made.
void check_names_are_unique(const formats::CheckpointContents& destination,
                            const PlanOptions& options, PlanReport& report);

/// Reports names that cannot be together in one nested dict, such as `d` and `d.x`, if new names
/// are the cause. A source whose own names do not fit is moved as it is to formats that do not
/// nest.
void check_names_form_a_tree(const formats::CheckpointContents& source,
                             const formats::CheckpointContents& destination, PlanReport& report);

/// Removes aliases whose tensor is left out. Requires: the tensors are sorted.
void remove_aliases_of_nothing(formats::CheckpointContents& destination);

}  // namespace tessera::reshard
