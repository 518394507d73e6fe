#pragma once

#include <optional>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::detail {

/// Which names are those of a checkpoint's files, be it of one that a writer has begun.
enum class FileNames {
  of_our_writers,     // of all formats
  of_one_checkpoint,  // whoever wrote it, of the one format that the directory's names tell
};

/// Whether the entry `name` of a directory is a file that our writers make, of whatever format.
bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name);

/// Returns the first name in a directory that is no file of a checkpoint.
std::optional<std::string> first_foreign_entry(const FileSystem& fs, const std::string& directory,
                                               FileNames names);

}  // namespace tessera::detail
