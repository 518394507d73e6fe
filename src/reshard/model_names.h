#pragma once

#include <string_view>

#include "reshard/plan_report.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Finding::rule of the note below. A program can find the note by it, and add its own words.
inline constexpr std::string_view kModelNamesRule = "names of the model";

/// Adds a note if programs that load the destination would not find the model's tensors by name.
/// Only for formats with a file per dict (FormatTraits::dicts_with_files): the file of `model`
/// leaves out `model.` of each name, so `model.x` of Hugging Face must be `model.model.x`.
void note_names_of_model(const Plan& plan, const PlanOptions& options, PlanReport& report);

}  // namespace tessera::reshard
