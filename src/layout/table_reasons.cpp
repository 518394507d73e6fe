#include "layout/table_reasons.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "base/size_text.h"

namespace tessera {
namespace {

constexpr double kAnySeconds = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-9;

std::string percent_text(double share) {
  char text[48];
  std::snprintf(text, sizeof text, share < 0.1 ? "%.2g %%" : "%.0f %%", share * 100);
  return text;
}

/// Returns in words that the first candidate takes the least total time, and the time of the next
/// candidate, which has another sharding type if possible.
std::string reason_of_cheapest(const PlannerTable& table) {
  const ShardingCandidate& chosen = table.candidates[0];
  auto next = std::find_if(
      table.candidates.begin(), table.candidates.end(),
      [&](const ShardingCandidate& other) { return other.sharding != chosen.sharding; });
  if (next == table.candidates.end()) next = table.candidates.begin() + 1;
  return "least total time, " + duration_text(chosen.total_seconds) + "; " + next->in_words() +
         " takes " + duration_text(next->total_seconds);
}

}  // namespace

std::string duration_text(double seconds) {
  constexpr std::array<const char*, 4> kUnits = {"s", "ms", "µs", "ns"};
  std::size_t unit = 0;
  while (seconds < 0.99995 && unit + 1 < kUnits.size()) {
    seconds *= 1000;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, seconds < 1e6 ? "%.1f %s" : "%.3g %s", seconds, kUnits[unit]);
  return text;
}

std::string reason_of(const Assignment& assignment, std::size_t t, const PlannerMachine& machine) {
  const PlannerTable& table = assignment.tables()[t];
  if (table.candidates.size() == 1) {
    const bool is_free = table.constraint.shardings.empty() && table.constraint.ranks.empty();
    return is_free ? "no other sharding is possible" : "its constraint allows nothing else";
  }
  if (assignment.choice(t)->candidate == 0) return reason_of_cheapest(table);
  const ShardingCandidate& cheapest = table.candidates.front();
  const std::string name = cheapest.in_words() + ": ";
  if (cheapest.largest_nbytes() > machine.capacity_nbytes) {
    return name + iec_size(cheapest.largest_nbytes()) + " on one rank, more than the " +
           iec_size(machine.capacity_nbytes) + " for tables";
  }
  const double slowest = assignment.score().slowest_seconds;
  Assignment other = assignment;
  other.take(t);
  auto choice = other.find_ranks(t, 0, kAnySeconds, LoadOrder::by_seconds);
  if (!choice) {
    return name + "no room for " + iec_size(cheapest.largest_nbytes()) +
           " next to the other tables";
  }
  other.put(t, std::move(*choice));
  const double longer = other.score().slowest_seconds / slowest - 1;
  if (longer > kRounding) {
    return name + "the slowest rank would take " + percent_text(longer) + " longer";
  }
  return name + "less total time, but spread less evenly over the ranks";
}

}  // namespace tessera
