#include "tessera/base/rename.h"

namespace tessera {

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
