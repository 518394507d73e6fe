#pragma once

#include <string>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// Returns the key path that `name` has after the renames; `path` is its path before. Keys that
/// both prefixes of a rename begin with stay as they are, and so do the keys after the prefix. The
/// keys between them become one key, together with the rest of the key in which the prefix ends.
/// Returns an empty path if `path` does not spell `name`.
formats::KeyPath renamed_path(const formats::KeyPath& path, const std::string& name,
                              const std::vector<Rename>& renames);

}  // namespace tessera::reshard
