#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/name_rules.h"

namespace tessera::detail {

/// The patterns of a selection that match no name.
struct UnusedPatterns {
  std::vector<std::string> wanted;      // patterns without `!`: probably typing errors
  std::vector<std::string> exclusions;  // patterns with their `!`: they leave nothing out
};

/// Returns the patterns of `selection` that match none of `names`.
inline UnusedPatterns unused_patterns(const NameSelection& selection,
                                      const std::vector<std::string_view>& names) {
  UnusedPatterns unused{selection.unused(names), {}};
  const auto first = std::ranges::stable_partition(
      unused.wanted, [](const std::string& pattern) { return !pattern.starts_with('!'); });
  std::ranges::move(first, std::back_inserter(unused.exclusions));
  unused.wanted.erase(first.begin(), first.end());
  return unused;
}

}  // namespace tessera::detail
