#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

namespace tessera::detail {

/// Removes `prefix` from the front of `text`. Returns false, without a change, if it is not there.
inline bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

/// Returns the parts of a text between its separators, as views of the text: for dots, `a`, `` and
/// `b` of `a..b`. An empty text has one empty part.
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t at = 0; at <= text.size(); at += parts.back().size() + 1) {
    parts.push_back(text.substr(at, std::min(text.find(separator, at), text.size()) - at));
  }
  return parts;
}

}  // namespace tessera::detail
