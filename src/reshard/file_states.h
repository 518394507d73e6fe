#pragma once

#include <string>

namespace tessera::reshard {

/// Returns in words the size of a file and the time of its last change, or that the file is
/// missing. Throws: Error(io).
std::string describe_file(const std::string& path);

}  // namespace tessera::reshard
