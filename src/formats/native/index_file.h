#pragma once

#include <cstdint>
#include <string>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native {

/// Writes and syncs `index.h5` of a checkpoint whose rank files are complete except their headers.
/// Equal indexes give equal files. Returns the checkpoint id.
std::uint64_t write_index_file(FileSystem& fs, const std::string& path, const Index& index);

}  // namespace tessera::formats::native
