#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Rules about names: patterns that select names, prefixes that rename names, similar names.

namespace tessera {

/// Says whether `name` matches `pattern`: `*` matches any number of characters, also dots; `?`
/// matches one character; `[a-z]` matches one character of a set, `[!a-z]` one outside of the set;
/// `\` outside of a set makes the next character ordinary. An unclosed `[` is ordinary too. A
/// character is a UTF-8 code point, or one byte of invalid UTF-8. Cost: never exponential.
bool glob_match(std::string_view pattern, std::string_view name);

/// Returns the glob that matches `text` and nothing else.
std::string glob_of(std::string_view text);

/// A selection of names by patterns (see glob_match; a pattern also matches the name it equals).
/// `layers.0` selects this name and all names below it, such as `layers.0.up.weight`. With `=`, a
/// pattern selects no names below: `=args` selects `args`, but not `args.weight`. `!args` and
/// `!=args` exclude what `args` and `=args` would select, even if another pattern selects it. If
/// no pattern selects (all exclude, or there are none), all names but the excluded are selected.
class NameSelection {
 public:
  NameSelection() = default;
  explicit NameSelection(std::vector<std::string> patterns);
  /// Says whether the patterns select `name`.
  bool selects(std::string_view name) const;
  bool selects_everything() const { return wanted_.empty() && unwanted_.empty(); }

  /// Returns the patterns, as given, that neither select nor exclude any of `names`.
  std::vector<std::string> unused(const std::vector<std::string_view>& names) const;

 private:
  std::vector<std::string> wanted_;
  std::vector<std::string> unwanted_;  // without the `!`
};

/// A rule: replace the prefix `from` of a name by `to`. An empty `from`: put `to` before the name.
struct Rename {
  std::string from;
  std::string to;
};

/// Applies the first rename whose `from` is a prefix of `name`, by characters: a rename of `a.1`
/// also changes `a.10`. If no rename fits, returns `name` unchanged.
std::string renamed(const std::string& name, const std::vector<Rename>& renames);

/// Parses `FROM=TO`; the first `=` counts. Returns nothing for a text without `=`, or for `=`.
std::optional<Rename> parse_rename(std::string_view text);

/// Returns how many insertions, deletions and replacements of bytes turn `a` into `b`.
/// Cost: O(a.size() * b.size()).
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Returns the word that someone who typed `text` may have meant, or nothing if no word is near. A
/// word is near if its edit distance is at most one, plus one for every four bytes of `text`.
/// Compares only the first 10,000 words; a text of more than 200 bytes has no near word.
std::optional<std::string_view> closest_word(std::string_view text,
                                             const std::vector<std::string_view>& words);

}  // namespace tessera
