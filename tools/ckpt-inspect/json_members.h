#pragma once

#include "cli/json_output.h"
#include "inspect/diff.h"
#include "inspect/statistics.h"
#include "tessera/layout/region.h"

namespace tessera::cli {

/// Writes `{"offsets": […], "sizes": […]}` or `{"begin": …, "end": …}`.
void write_region(JsonOutput& json, const Region& region);

/// Writes the members of an object that is open: `numel`, `zeros`, `nan`, …, `std`.
void write_statistics(JsonOutput& json, const inspect::Statistics& statistics);

/// Returns `missing`, `extra`, `shape`, …: a kind's name in output.
std::string_view kind_name(inspect::Difference::Kind kind);

/// Writes the members of an object that is open: `kind`, `name`, and what there is to say.
void write_difference(JsonOutput& json, const inspect::Difference& difference);

}  // namespace tessera::cli
