#include "arithmetic/rounding_losses.h"

#include <algorithm>
#include <iterator>

namespace tessera::arithmetic {

std::vector<RoundingLosses::Part> RoundingLosses::take(const std::string& fqn, const Region& region,
                                                       FlatRange range, int share) {
  const std::lock_guard lock(mutex_);
  Ranges& taken = taken_[{fqn, share, region}];
  auto next = taken.upper_bound(range.begin);
  if (next != taken.begin() && std::prev(next)->second >= range.begin) --next;
  FlatRange united = range;
  std::vector<Part> parts;
  std::int64_t at = range.begin;
  const auto add_until = [&](std::int64_t end, bool is_new) {
    end = std::min(end, range.end);
    if (at < end) parts.push_back({{at, end}, is_new});
    at = std::max(at, end);
  };
  while (next != taken.end() && next->first <= range.end) {
    add_until(next->first, true);
    add_until(next->second, false);
    united = {std::min(united.begin, next->first), std::max(united.end, next->second)};
    next = taken.erase(next);
  }
  add_until(range.end, true);
  taken.emplace(united.begin, united.end);
  return parts;
}

void RoundingLosses::add(const std::string& fqn, const CastLosses& losses) {
  if (losses.num_too_large == 0 && losses.num_became_zero == 0) return;
  const std::lock_guard lock(mutex_);
  by_name_[fqn].merge(losses);
}

std::map<std::string, CastLosses> RoundingLosses::all() const {
  const std::lock_guard lock(mutex_);
  return by_name_;
}

}  // namespace tessera::arithmetic
