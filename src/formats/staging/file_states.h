#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <ctime>
#include <functional>
#include <map>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// What tells that a file is no longer the one that it was: its object, its size, and the time of
/// its last change, which no program can set.
struct FileState {
  ino_t inode = 0;
  off_t nbytes = 0;
  std::timespec changed{};

  friend bool operator==(const FileState& a, const FileState& b) {
    return a.inode == b.inode && a.nbytes == b.nbytes && a.changed.tv_sec == b.changed.tv_sec &&
           a.changed.tv_nsec == b.changed.tv_nsec;
  }
};

/// Files by their paths.
using FileStates = std::map<std::string, FileState>;

/// Returns the states of all entries of a directory, or of the file or link at `path`; nothing if
/// there is none.
FileStates file_states_at(const FileSystem& fs, const std::string& path);

/// Throws Error(already_exists) naming the first file at `path` that is not as in `before`.
/// `is_kept` accepts files that may have changed.
void require_file_states(const FileSystem& fs, const std::string& path, const FileStates& before,
                         const std::function<bool(const std::string& file)>& is_kept = {});

}  // namespace tessera::formats
