#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <ctime>
#include <functional>
#include <map>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Properties of a file: at least one differs after a program has changed or replaced the file.
struct FileState {
  ino_t inode = 0;
  nlink_t num_links = 0;
  off_t nbytes = 0;
  std::timespec modified{};  // mtime, which a program can set
  std::timespec changed{};   // ctime, which no program can set; hard links change it
};

/// Whether two states of a file, seen one after the other, show no change of its bytes. Compares
/// the ctime only if the file had one hard link both times: making a link changes the ctime, too.
bool is_unchanged(const FileState& before, const FileState& after);

/// The states of files. Key: the path of the file.
using FileStates = std::map<std::string, FileState>;

/// Returns the state of the file or link at `path`. If `path` is a directory, returns the states of
/// its entries, and of all files in those of its folders that a format may own (`may_own_folder` of
/// a FormatDriver). Empty if nothing is there.
FileStates file_states_at(const FileSystem& fs, const std::string& path);

/// Throws Error(already_exists) naming the first file at `path` that is new or has changed since
/// `before`. Does not notice removed files. `is_kept`: returns true for a file to ignore.
void require_file_states(const FileSystem& fs, const std::string& path, const FileStates& before,
                         const std::function<bool(const std::string& file)>& is_kept = {});

}  // namespace tessera::formats
