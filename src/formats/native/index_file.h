#pragma once

#include <cstdint>
#include <string>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native {

/// Writes and syncs `index.h5` of a checkpoint whose rank files lack only their headers. Equal
/// indexes give equal files. Returns the checkpoint id, which those headers need.
std::uint64_t write_index_file(FileSystem& fs, const std::string& path, const Index& index);

}  // namespace tessera::formats::native
