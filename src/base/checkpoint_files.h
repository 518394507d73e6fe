#pragma once

#include <optional>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::detail {

/// Returns the first name in a directory that is no file of a checkpoint, be it one that a writer
/// has begun. Checkpoints of all formats, whoever wrote them, are known by the ends of names.
std::optional<std::string> first_foreign_entry(const FileSystem& fs, const std::string& directory);

}  // namespace tessera::detail
