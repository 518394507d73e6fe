#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <ctime>
#include <functional>
#include <map>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Shows whether a file has changed or been replaced: its inode, its size, and the time of its last
/// change, which no program can set.
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

/// Returns the states of all entries if `path` is a directory, also of those in folders that a
/// format can have there; otherwise the state of the file or link at `path`. The result is empty if
/// nothing is there.
FileStates file_states_at(const FileSystem& fs, const std::string& path);

/// Throws Error(already_exists) naming the first file at `path` that is new or has another state
/// than in `before`. `is_kept` accepts files that may be new or changed.
void require_file_states(const FileSystem& fs, const std::string& path, const FileStates& before,
                         const std::function<bool(const std::string& file)>& is_kept = {});

}  // namespace tessera::formats
