#pragma once

#include <string>

#include "layout/table_search.h"

namespace tessera {

/// Returns in words and numbers why a table is sharded as it is, and not by what takes least time
/// of all ranks together.
std::string reason_of(const Assignment& assignment, std::size_t table,
                      const PlannerMachine& machine);

/// Returns `1.2 ms`: of s, ms, µs and ns the unit that leaves at least one digit before the point.
std::string duration_text(double seconds);

}  // namespace tessera
