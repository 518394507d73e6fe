#pragma once

#include <cstddef>
#include <string>

namespace tessera::detail {

/// Returns words as a choice: `a`, `a or b`, `a, b or c`.
template <class Words>
std::string choice_of(const Words& words) {
  std::string text;
  std::size_t i = 0;
  for (const auto& word : words) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += word;
    ++i;
  }
  return text;
}

}  // namespace tessera::detail
