#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Returns how many files all readers of the process together keep open: an eighth of the process's
/// limit (RLIMIT_NOFILE), but at least 4 and at most 128.
std::size_t num_files_kept_open();

/// Opens a file for a reader that may have many files. The file stays open while it is among the
/// most recently read ones, and is opened again when needed. `fs` must outlive the returned file.
/// Thread-safe. Throws: as FileSystem::open. A read throws Error(mismatch) if the file has been
/// written since it was opened. A read that opens the file again throws Error(corruption) if its
/// size has changed, and Error(mismatch) if it has been replaced (ReadableFile::version).
std::unique_ptr<ReadableFile> open_kept(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
