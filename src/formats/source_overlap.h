#pragma once

#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Throws Error(invalid_argument) if a source and a destination overlap: one is inside the other,
/// the source is at the staging path of the destination, or both are the same URL.
void require_apart(const FileSystem& fs, const std::string& source, const std::string& destination);

}  // namespace tessera::formats
