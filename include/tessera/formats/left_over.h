#pragma once

#include <optional>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Returns the path of a replaced checkpoint that its writer could not remove: the staging path, or
/// the values beside a single safetensors file. Nothing if the writer removed everything.
/// Requires: the checkpoint at `destination` has replaced another one.
std::optional<std::string> left_over_at(const FileSystem& fs, const std::string& destination);

}  // namespace tessera::formats
