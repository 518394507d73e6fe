#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::detail {

/// Removes `prefix` from the front of `text`. Returns false, without a change, if it is not there.
inline bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

/// Returns the parts of a text between its dots: `a`, `` and `b` of `a..b`.
inline std::vector<std::string> split_at_dots(std::string_view text) {
  std::vector<std::string> parts;
  for (std::size_t dot = text.find('.'); dot != std::string_view::npos; dot = text.find('.')) {
    parts.emplace_back(text.substr(0, dot));
    text.remove_prefix(dot + 1);
  }
  parts.emplace_back(text);
  return parts;
}

}  // namespace tessera::detail
