#include "tessera/base/name_rules.h"

#include <algorithm>
#include <span>
#include <utility>

namespace tessera {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0U : 1U);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row.back();
}

std::optional<std::string_view> closest_word(std::string_view text,
                                             const std::vector<std::string_view>& words) {
  constexpr std::size_t kMaxWords = 10000;
  constexpr std::size_t kMaxNbytes = 200;
  if (text.size() > kMaxNbytes) return std::nullopt;
  std::optional<std::string_view> closest;
  std::size_t closest_distance = 2 + text.size() / 4;  // one more than allowed
  for (std::string_view word : std::span(words).first(std::min(words.size(), kMaxWords))) {
    if (word.size() > text.size() + closest_distance ||
        text.size() > word.size() + closest_distance) {
      continue;
    }
    const std::size_t distance = edit_distance(text, word);
    if (distance < closest_distance) {
      closest_distance = distance;
      closest = word;
    }
  }
  return closest;
}

}  // namespace tessera
