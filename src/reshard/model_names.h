#pragma once

#include <string_view>

#include "reshard/plan_report.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// The rule of the note below, so that a program can add its own words to it.
inline constexpr std::string_view kModelNamesRule = "names of the model";

/// Adds a note if programs that load the destination would not find the model's tensors by name.
/// Files drop the `model.` before each name, so a lone Hugging Face model needs one more. Only for
/// formats that store some dicts in files of their own (FormatTraits::dicts_with_files).
void note_names_of_model(const Plan& plan, const PlanOptions& options, PlanReport& report);

}  // namespace tessera::reshard
