#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Replaces the leading `from` of a name by `to`. An empty `from` is that of every name.
struct Rename {
  std::string from;
  std::string to;
};

/// Returns the name with the first prefix that fits it replaced.
std::string renamed(const std::string& name, const std::vector<Rename>& renames);

/// Returns what `FROM=TO` says; nothing where there is no `=`, or nothing beside it.
std::optional<Rename> parse_rename(std::string_view text);

}  // namespace tessera
