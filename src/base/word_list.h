#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::detail {

/// Joins words with commas, the final two with `last`. For ` or `: `a`, `a or b`, `a, b or c`.
template <class Words>
std::string joined(const Words& words, std::string_view last) {
  std::string text;
  std::size_t i = 0;
  for (const auto& word : words) {
    if (i > 0) text += i + 1 == words.size() ? last : ", ";
    text += word;
    ++i;
  }
  return text;
}

/// Returns words as a choice: `a`, `a or b`, `a, b or c`.
template <class Words>
std::string choice_of(const Words& words) {
  return joined(words, " or ");
}

/// Returns words as a list: `a`, `a and b`, `a, b and c`.
template <class Words>
std::string list_of(const Words& words) {
  return joined(words, " and ");
}

}  // namespace tessera::detail
