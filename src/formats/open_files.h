#pragma once

#include <cstddef>

namespace tessera::formats {

/// Returns how many of its files a reader keeps open: an eighth of what the process may have open
/// (RLIMIT_NOFILE), from 4 to 128. There may be several readers, and writers.
std::size_t num_files_kept_open();

}  // namespace tessera::formats
