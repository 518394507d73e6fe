#include "tessera/base/name_rules.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/utf8.h"

namespace tessera {
namespace {

/// One character: a UTF-8 code point, or a byte of invalid UTF-8.
struct Character {
  std::uint32_t code;  // an invalid byte sorts after all code points
  std::size_t nbytes;
};

/// Returns the character that begins at `begin`. Requires: `begin < text.size()`.
Character character_at(std::string_view text, std::size_t begin) {
  const std::size_t nbytes = detail::utf8_sequence_nbytes(text, begin);
  if (nbytes == 0) return {0x110000U + static_cast<unsigned char>(text[begin]), 1};
  return {detail::code_point_of(text.substr(begin, nbytes)), nbytes};
}

struct SetMatch {
  bool matches;
  std::size_t nbytes;  // of the whole `[…]`
};

/// Matches one character against the set at the start of `pattern`, or returns nothing if there is
/// no `]`.
std::optional<SetMatch> match_set(std::string_view pattern, Character character) {
  std::size_t i = 1;
  const bool negated = i < pattern.size() && pattern[i] == '!';
  if (negated) ++i;
  bool found = false;
  for (bool is_first = true; i < pattern.size(); is_first = false) {
    if (pattern[i] == ']' && !is_first) return SetMatch{found != negated, i + 1};
    const Character low = character_at(pattern, i);
    Character high = low;
    i += low.nbytes;
    if (i + 1 < pattern.size() && pattern[i] == '-' && pattern[i + 1] != ']') {
      high = character_at(pattern, i + 1);
      i += 1 + high.nbytes;
    }
    found = found || (low.code <= character.code && character.code <= high.code);
  }
  return std::nullopt;
}

/// Matches one character against the first element of `pattern` (which is not `*`). Returns how
/// many bytes of the pattern this element has, or nothing if the character does not match.
std::optional<std::size_t> match_one(std::string_view pattern, Character character) {
  if (pattern.empty()) return std::nullopt;
  if (pattern[0] == '?') return 1;
  if (pattern[0] == '[') {
    if (const auto set = match_set(pattern, character)) {
      return set->matches ? std::optional(set->nbytes) : std::nullopt;
    }
  }
  const std::size_t begin = pattern[0] == '\\' && pattern.size() > 1 ? 1 : 0;
  const Character expected = character_at(pattern, begin);
  return expected.code == character.code ? std::optional(begin + expected.nbytes) : std::nullopt;
}

/// Says whether the pattern selects the name. A pattern without `=` also selects the names below a
/// name that it matches: `layers.0` selects `layers.0.bias`.
bool pattern_selects(const std::string& pattern, std::string_view name) {
  if (pattern == name) return true;
  if (pattern.starts_with('=')) {
    const std::string_view alone = std::string_view(pattern).substr(1);
    return alone == name || glob_match(alone, name);
  }
  return glob_match(pattern, name) || glob_match(pattern + ".*", name);
}

}  // namespace

std::string glob_of(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    const bool is_special = std::string_view("*?[\\!").find(c) != std::string_view::npos;
    if (is_special || (c == '=' && pattern.empty())) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

bool glob_match(std::string_view pattern, std::string_view name) {
  std::size_t p = 0;
  std::size_t n = 0;
  std::optional<std::size_t> star;  // position in the pattern after the last `*`
  std::size_t star_name = 0;        // position in the name after the text that this `*` matches
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = ++p;
      star_name = n;
      continue;
    }
    const Character character = character_at(name, n);
    if (const auto nbytes = match_one(pattern.substr(p), character)) {
      p += *nbytes;
      n += character.nbytes;
    } else if (star) {
      p = *star;
      star_name += character_at(name, star_name).nbytes;
      n = star_name;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

NameSelection::NameSelection(std::vector<std::string> patterns) {
  for (std::string& pattern : patterns) {
    if (pattern.starts_with('!')) {
      unwanted_.push_back(pattern.substr(1));
    } else {
      wanted_.push_back(std::move(pattern));
    }
  }
}

bool NameSelection::selects(std::string_view name) const {
  const auto matches = [&](const std::string& pattern) { return pattern_selects(pattern, name); };
  if (std::any_of(unwanted_.begin(), unwanted_.end(), matches)) return false;
  return wanted_.empty() || std::any_of(wanted_.begin(), wanted_.end(), matches);
}

std::vector<std::string> NameSelection::unused(const std::vector<std::string_view>& names) const {
  std::vector<std::string> unused;
  const auto collect = [&](const std::vector<std::string>& patterns, const char* prefix) {
    for (const std::string& pattern : patterns) {
      if (std::none_of(names.begin(), names.end(),
                       [&](std::string_view name) { return pattern_selects(pattern, name); })) {
        unused.push_back(prefix + pattern);
      }
    }
  };
  collect(wanted_, "");
  collect(unwanted_, "!");
  return unused;
}

std::string renamed(const std::string& name, const std::vector<Rename>& renames) {
  for (const Rename& rename : renames) {
    if (name.starts_with(rename.from)) return rename.to + name.substr(rename.from.size());
  }
  return name;
}

std::optional<Rename> parse_rename(std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos || text.size() == 1) return std::nullopt;
  return Rename{std::string(text.substr(0, equals)), std::string(text.substr(equals + 1))};
}

}  // namespace tessera
