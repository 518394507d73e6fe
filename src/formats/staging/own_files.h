#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Which files count as a checkpoint's files. Files that are still being written count too.
enum class FileNames {
  of_our_writers,     // files that Tessera's writers make, of all formats
  of_one_checkpoint,  // files of one checkpoint, from any program; their names show its format
};

/// Whether the entry `name` of a directory is a file that Tessera's writers make, for any format,
/// or a folder that holds only files that the writer of one format makes.
bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name);

/// Whether there is a regular file, and not a link, at `path`.
bool is_plain_file(const std::string& path);

/// Whether there is a directory, and not a link, at `path`.
bool is_plain_folder(const std::string& path);

/// Returns the paths, relative to the directory, of all files in a directory and in its folders.
/// Returns a link as a file. Enters 8 levels of folders; returns any deeper folder as a file, too.
std::vector<std::string> list_files_within(const FileSystem& fs, const std::string& directory);

/// Whether any of `paths` is the path of a file in the folder `folder`.
bool has_file_in(const std::set<std::string>& paths, const std::string& folder);

/// Returns the first entry of a directory that does not belong to a checkpoint: a name, or the path
/// of a file in a folder that a checkpoint may have. Returns nothing if all entries belong to a
/// checkpoint. Ignores the mark of an incomplete checkpoint (kIncompleteMark). `is_extra`, if
/// given, says which other files to accept. It gets the file's name.
std::optional<std::string> first_foreign_entry(
    const FileSystem& fs, const std::string& directory, FileNames names,
    const std::function<bool(const std::string& name)>& is_extra = {});

}  // namespace tessera::formats
