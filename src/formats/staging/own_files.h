#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Which names belong to a checkpoint's files, also while the checkpoint is being written.
enum class FileNames {
  of_our_writers,     // in all formats
  of_one_checkpoint,  // written by anybody, in the one format that the names show
};

/// Whether the entry `name` of a directory is a file that a writer of Tessera makes, of any format.
bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name);

/// Whether there is a regular file, and not a link, at `path`.
bool is_plain_file(const std::string& path);

/// Returns the first name in a directory that does not belong to a checkpoint; nothing if there is
/// none. `is_extra`, if given, accepts further names.
std::optional<std::string> first_foreign_entry(
    const FileSystem& fs, const std::string& directory, FileNames names,
    const std::function<bool(const std::string& name)>& is_extra = {});

}  // namespace tessera::formats
