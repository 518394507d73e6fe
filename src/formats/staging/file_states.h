#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <ctime>
#include <functional>
#include <map>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// The inode, size and ctime of a file. If it has several hard links: its mtime, not its ctime. A
/// program that changes or replaces the file changes at least one of them: it cannot set the ctime.
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

/// Returns the state of the file or link at `path`. If `path` is a directory, returns the states of
/// all its entries, and of the entries of folders that belong to a format. Empty if nothing is
/// there.
FileStates file_states_at(const FileSystem& fs, const std::string& path);

/// Throws Error(already_exists) naming the first file at `path` that is new or has another state
/// than in `before`. Ignores files for which `is_kept` returns true.
void require_file_states(const FileSystem& fs, const std::string& path, const FileStates& before,
                         const std::function<bool(const std::string& file)>& is_kept = {});

}  // namespace tessera::formats
