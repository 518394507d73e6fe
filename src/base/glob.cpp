#include "tessera/base/glob.h"

#include <algorithm>
#include <optional>

namespace tessera {
namespace {

struct SetMatch {
  bool matches;
  std::size_t nbytes;  // of the whole `[…]`
};

/// Matches one byte against the set at the start of `pattern`, or returns nothing where `]` lacks.
std::optional<SetMatch> match_set(std::string_view pattern, char byte) {
  std::size_t i = 1;
  const bool negated = i < pattern.size() && pattern[i] == '!';
  if (negated) ++i;
  bool found = false;
  for (bool is_first = true; i < pattern.size(); is_first = false) {
    if (pattern[i] == ']' && !is_first) return SetMatch{found != negated, i + 1};
    const char low = pattern[i];
    if (i + 2 < pattern.size() && pattern[i + 1] == '-' && pattern[i + 2] != ']') {
      const char high = pattern[i + 2];
      found = found || (static_cast<unsigned char>(low) <= static_cast<unsigned char>(byte) &&
                        static_cast<unsigned char>(byte) <= static_cast<unsigned char>(high));
      i += 3;
    } else {
      found = found || low == byte;
      ++i;
    }
  }
  return std::nullopt;
}

/// Matches one byte against the first element of `pattern` (which is no `*`); returns the bytes of
/// that element, or nothing where it does not match.
std::optional<std::size_t> match_one(std::string_view pattern, char byte) {
  if (pattern.empty()) return std::nullopt;
  if (pattern[0] == '?') return 1;
  if (pattern[0] == '[') {
    if (const auto set = match_set(pattern, byte)) {
      return set->matches ? std::optional(set->nbytes) : std::nullopt;
    }
  }
  if (pattern[0] == '\\' && pattern.size() > 1) {
    return pattern[1] == byte ? std::optional<std::size_t>(2) : std::nullopt;
  }
  return pattern[0] == byte ? std::optional<std::size_t>(1) : std::nullopt;
}

/// Says whether the pattern selects the name, or something above it.
bool pattern_selects(const std::string& pattern, std::string_view name) {
  return pattern == name || glob_match(pattern, name) || glob_match(pattern + ".*", name);
}

}  // namespace

bool glob_match(std::string_view pattern, std::string_view name) {
  std::size_t p = 0;
  std::size_t n = 0;
  std::optional<std::size_t> star;  // where to go on in the pattern after the last `*`
  std::size_t star_name = 0;        // and the first byte which that `*` has not taken yet
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = ++p;
      star_name = n;
    } else if (const auto nbytes = match_one(pattern.substr(p), name[n])) {
      p += *nbytes;
      ++n;
    } else if (star) {
      p = *star;
      n = ++star_name;
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

}  // namespace tessera
