#pragma once

#include <optional>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Which names are those of a checkpoint's files, also of a checkpoint that is not finished yet.
enum class FileNames {
  of_our_writers,     // of all formats
  of_one_checkpoint,  // whoever wrote it, of the one format that the directory's names tell
};

/// Whether the entry `name` of a directory is a file that Tessera's writers make, of any format.
bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name);

/// Returns the first name in a directory that is not a checkpoint's file.
std::optional<std::string> first_foreign_entry(const FileSystem& fs, const std::string& directory,
                                               FileNames names);

}  // namespace tessera::formats
