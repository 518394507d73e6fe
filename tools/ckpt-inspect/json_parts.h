#pragma once

#include "cli/json_output.h"
#include "tessera/inspect/statistics.h"
#include "tessera/layout/region.h"

namespace tessera::cli {

/// Writes `{"offsets": […], "sizes": […]}` or `{"begin": …, "end": …}`.
void write_region(JsonOutput& json, const Region& region);

/// Writes the members of an object that is open: `numel`, `zeros`, `nan`, …, `std`.
void write_statistics(JsonOutput& json, const inspect::Statistics& statistics);

}  // namespace tessera::cli
