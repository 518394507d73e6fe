#pragma once

#include <string>
#include <vector>

#include "tessera/base/rename.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// Returns the key path that `name` has after the renames; `path` is its path before. Steps that
/// both prefixes of the rename share and steps after the prefix stay as they are. The steps between
/// become one step, with the rest of the step in which the prefix ends. Returns an empty path if
/// `path` does not spell `name`.
formats::KeyPath renamed_path(const formats::KeyPath& path, const std::string& name,
                              const std::vector<Rename>& renames);

}  // namespace tessera::reshard
