#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns how many insertions, deletions and replacements of bytes lead from `a` to `b`.
/// Cost: O(a.size() * b.size()).
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Returns the word that someone who typed `text` may have meant, or nothing where none is near:
/// one edit, and one more for every four bytes. Of a very long list, or for a very long text, only
/// the start is looked at.
std::optional<std::string_view> closest_word(std::string_view text,
                                             const std::vector<std::string_view>& words);

}  // namespace tessera
