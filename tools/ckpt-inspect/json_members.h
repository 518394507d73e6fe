#pragma once

#include "cli/json_output.h"
#include "inspect/diff.h"
#include "inspect/statistics.h"
#include "inspect/summary.h"
#include "tessera/layout/region.h"

namespace tessera::cli {

/// Writes `{"offsets": […], "sizes": […]}` or `{"begin": …, "end": …}`.
void write_region(JsonOutput& json, const Region& region);

/// Writes members into the open JSON object: `numel`, `zeros`, `nan`, …, `std`.
void write_statistics(JsonOutput& json, const inspect::Statistics& statistics);

/// Writes the member `aliases`, if aliases are selected: `[{"name": …, "alias_of": …}]`.
void write_aliases(JsonOutput& json, const formats::CheckpointContents& contents,
                   const inspect::Selection& selection);

/// Returns the name of a kind of difference in the output: `missing`, `extra`, `shape`, …
std::string_view kind_name(inspect::Difference::Kind kind);

/// Writes members into the open JSON object: `kind`, `name`, and the members that this kind has.
void write_difference(JsonOutput& json, const inspect::Difference& difference);

}  // namespace tessera::cli
