#pragma once

#include <optional>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Returns the path of what a writer that is done has replaced and could not remove: what stands at
/// its staging path, or the values beside a single safetensors file. Nothing where there is none.
/// Requires: the checkpoint at `destination` has replaced another one.
std::optional<std::string> left_over_at(const FileSystem& fs, const std::string& destination);

}  // namespace tessera::formats
