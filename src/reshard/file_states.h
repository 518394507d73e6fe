#pragma once

#include <optional>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::reshard {

/// What is at a path, links followed.
struct FoundFile {
  std::optional<FileKind> kind;  // nothing if the file is missing
  std::string state;  // in words: the size and the time of the last change, or what else is there
};

/// Looks at a path. Throws: Error(io).
FoundFile find_file(const std::string& path);

}  // namespace tessera::reshard
