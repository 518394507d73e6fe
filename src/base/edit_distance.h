#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns how many insertions, deletions and replacements of bytes turn `a` into `b`.
/// Cost: O(a.size() * b.size()).
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Returns the word that someone who typed `text` may have meant, or nothing if no word is near. A
/// word is near if its edit distance is at most one, plus one for every four bytes of `text`.
/// Compares only the first 10,000 words; a text of more than 200 bytes has no near word.
std::optional<std::string_view> closest_word(std::string_view text,
                                             const std::vector<std::string_view>& words);

}  // namespace tessera
