#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace tessera::formats {

/// Whether a file's name matches `pattern`, in which each `#` stands for one or more digits.
inline bool is_name_like(std::string_view name, std::string_view pattern) {
  for (const char expected : pattern) {
    const std::size_t num_taken = expected == '#'
                                      ? std::min(name.find_first_not_of("0123456789"), name.size())
                                      : std::size_t{name.starts_with(expected)};
    if (num_taken == 0) return false;
    name.remove_prefix(num_taken);
  }
  return name.empty();
}

}  // namespace tessera::formats
