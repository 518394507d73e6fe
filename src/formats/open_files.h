#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Returns how many files all readers of the process keep open together: an eighth of what it may
/// have open (RLIMIT_NOFILE), from 4 to 128.
std::size_t num_files_kept_open();

/// Opens a file for a reader that may have many, beside other readers that may have many: it is
/// kept open while it is among those read last, and opened anew when it is read again. `fs` must
/// outlive it. Thread-safe.
/// Throws: as FileSystem::open; when read, Error(corruption) where another file has taken its place
/// that has another size.
std::unique_ptr<ReadableFile> open_kept(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
