#pragma once

#include <string>

#include "layout/table_search.h"

namespace tessera {

/// Returns in words and numbers why the planner chose a table's sharding. If another sharding would
/// take less total time, the text says why the planner did not choose it.
std::string reason_of(const Assignment& assignment, std::size_t table,
                      const PlannerMachine& machine);

/// Returns a duration as text, such as `1.2 ms`. Uses the largest unit (s, ms, µs, ns) that gives a
/// number of 1 or more.
std::string duration_text(double seconds);

}  // namespace tessera
