#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Says whether `name` matches `pattern`: `*` stands for any characters, dots included, `?` for
/// one,
/// `[a-z]` and `[!a-z]` for one of a set; `\` takes the next character as it is. An unclosed `[` is
/// an ordinary character. A character is a code point in UTF-8, or one byte that is no UTF-8.
/// Cost: O(name * pattern), never exponential.
bool glob_match(std::string_view pattern, std::string_view name);

/// Returns the pattern that `text` alone matches.
std::string glob_of(std::string_view text);

/// Selects names by patterns. A pattern selects the names it matches or equals, and all below them:
/// `model.layers.0` selects `model.layers.0.up.weight`. Without patterns everything is selected; a
/// pattern that begins with `!` takes names away; where only such patterns are given, all other
/// names are selected.
class NameSelection {
 public:
  NameSelection() = default;
  explicit NameSelection(std::vector<std::string> patterns);
  /// Says whether the patterns take `name`. Without patterns they take every name.
  bool selects(std::string_view name) const;
  bool selects_everything() const { return wanted_.empty() && unwanted_.empty(); }

  /// Returns the patterns that match none of `names`, as they were given.
  std::vector<std::string> unused(const std::vector<std::string_view>& names) const;

 private:
  std::vector<std::string> wanted_;
  std::vector<std::string> unwanted_;  // without the `!`
};

}  // namespace tessera
