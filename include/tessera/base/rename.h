#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A rule that replaces the prefix `from` of a name by `to`. Every name has the empty prefix.
struct Rename {
  std::string from;
  std::string to;
};

/// Applies the first rename whose prefix `name` has. Without one, returns `name` unchanged.
std::string renamed(const std::string& name, const std::vector<Rename>& renames);

/// Parses `FROM=TO`. Returns nothing if there is no `=`, or if both sides are empty.
std::optional<Rename> parse_rename(std::string_view text);

}  // namespace tessera
