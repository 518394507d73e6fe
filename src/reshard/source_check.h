#pragma once

#include <string_view>

#include "reshard/optimizer_rules.h"
#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// Checks of the source that all planners share, with the same messages.
namespace tessera::reshard {

/// Returns whether a name belongs to a flat vector that FSDP1 writes for a whole unit under
/// LOCAL_STATE_DICT (`_flat_param`; `flat_param_0` before torch 1.13). The checkpoint does not say
/// which parameters are in it.
bool is_bare_flat_vector(std::string_view fqn);

void report_missing_files(const formats::CheckpointContents& source, Relaxation missing,
                          PlanReport& report);

/// Reports a source that is only a part of a checkpoint, such as the file of one rank: as a note if
/// `part` is Relaxation::allow, else as a problem.
void report_part(const formats::CheckpointContents& source, Relaxation part, PlanReport& report);

/// Reports the findings that the reader made when it opened the source. If `missing` is
/// Relaxation::allow, errors become notes.
void report_opening_findings(const formats::CheckpointContents& source, Relaxation missing,
                             PlanReport& report);

/// Adds a note about each class whose objects the reader has opened as dicts or entries.
void note_opened_classes(const formats::CheckpointContents& source, PlanReport& report);

/// Returns whether the pieces hold every element once (equal pieces count as one); if not, reports
/// why: as a note for elements without a piece if `missing` allows it, else as a problem.
bool has_sound_pieces(const formats::TensorEntry& tensor, Relaxation missing, PlanReport& report);

/// Returns whether the shape of optimizer state fits its parameter and its kind; if not, reports a
/// problem.
bool has_shape_of_kind(const formats::CheckpointContents& source,
                       const formats::TensorEntry& tensor, const StateRole& role,
                       PlanReport& report);

}  // namespace tessera::reshard
