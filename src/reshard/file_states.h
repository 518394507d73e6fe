#pragma once

#include <optional>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {

/// What is at a path, links followed.
struct FoundFile {
  std::optional<FileKind> kind;  // nothing if the file is missing
  FileState state;  // in words: the size and the time of the last change, or what else is there
};

/// Looks at a path. Throws: Error(io).
FoundFile find_file(const std::string& path);

/// Whether two states of the file at `path` show no change. Compares inode numbers, too, because a
/// program may replace a file by another one of the same size and time of change (`cp -p`, `rsync
/// -t`). Does not compare the time of the last change of the inode (ctime): hard links to a base,
/// their removal, and chmod change it, but not the bytes.
bool is_same_state(const std::string& path, const FileState& before, const FileState& now);

/// Returns `state.words`, or, if they are those of `before`, words for another file.
std::string change_in_words(const FileState& before, const FileState& state);

}  // namespace tessera::reshard
