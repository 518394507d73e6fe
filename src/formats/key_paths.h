#pragma once

#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Checks that the names and key paths of all tensors, values and aliases form one tree of dicts
/// and lists: names are UTF-8, each path spells its name, no container is also an entry, and no
/// container is a dict for one entry but a list for another.
/// Throws: Error(invalid_argument) with `destination` and the entry's name.
void check_key_paths(const CheckpointContents& contents, const std::string& destination);

}  // namespace tessera::formats
