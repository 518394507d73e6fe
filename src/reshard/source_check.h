#pragma once

#include <string_view>

#include "reshard/optimizer_rules.h"
#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// Checks of the source that all planners share, with the same messages. A check reports what it
// finds, and returns whether the tensor can be used.
namespace tessera::reshard {

/// Returns whether a name is that of a flat vector that FSDP1 writes for a whole unit under
/// LOCAL_STATE_DICT (`_flat_param`; `flat_param_0` before torch 1.13). The checkpoint does not say
/// which parameters are in it.
bool is_bare_flat_vector(std::string_view fqn);

void report_missing_files(const formats::CheckpointContents& source, Relaxation missing,
                          PlanReport& report);

/// Reports a source that is one part of a checkpoint, such as the file of one rank.
void report_part(const formats::CheckpointContents& source, Relaxation part, PlanReport& report);

/// Reports what the reader found while it opened the source. If `missing` allows errors, they
/// become notes.
void report_opening_findings(const formats::CheckpointContents& source, Relaxation missing,
                             PlanReport& report);

/// Notes the classes whose objects the reader turned into entries or dicts.
void note_opened_classes(const formats::CheckpointContents& source, PlanReport& report);

/// Returns whether the pieces hold every element once. `missing` may allow holes, but never
/// overlaps.
bool has_sound_pieces(const formats::TensorEntry& tensor, Relaxation missing, PlanReport& report);

/// Returns whether the shape of state fits its parameter: a file may contain anything.
bool has_shape_of_kind(const formats::CheckpointContents& source,
                       const formats::TensorEntry& tensor, const StateRole& role,
                       PlanReport& report);

}  // namespace tessera::reshard
