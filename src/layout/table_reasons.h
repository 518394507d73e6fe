#pragma once

#include <string>

#include "layout/table_search.h"

namespace tessera {

/// Returns in words and numbers why a table has its sharding, and not the one with the least total
/// time.
std::string reason_of(const Assignment& assignment, std::size_t table,
                      const PlannerMachine& machine);

/// Returns `1.2 ms`: in the largest of the units s, ms, µs and ns in which the number is at least
/// 1.
std::string duration_text(double seconds);

}  // namespace tessera
