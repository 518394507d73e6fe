#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Which names belong to a checkpoint's files, also while the checkpoint is being written.
enum class FileNames {
  of_our_writers,     // in all formats
  of_one_checkpoint,  // written by anybody, in the one format that the names show
};

/// Whether the entry `name` of a directory is a file that a writer of Tessera makes, of any format,
/// or a folder with nothing but such files of one format.
bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name);

/// Whether there is a regular file, and not a link, at `path`.
bool is_plain_file(const std::string& path);

/// Whether there is a directory, and not a link, at `path`.
bool is_plain_folder(const std::string& path);

/// Returns the paths of all entries in a directory and in its folders, from the directory on,
/// without the folders themselves. Does not enter links. Entries that are nested too deep are
/// returned as their folder.
std::vector<std::string> list_files_within(const FileSystem& fs, const std::string& directory);

/// Whether any of the paths is of a file in the folder `folder`.
bool has_file_in(const std::set<std::string>& paths, const std::string& folder);

/// Returns the first entry of a directory that does not belong to a checkpoint: a name, or the path
/// of a file in a folder that a checkpoint may have. Returns nothing if all belong to one.
/// `is_extra`, if given, accepts further names.
std::optional<std::string> first_foreign_entry(
    const FileSystem& fs, const std::string& directory, FileNames names,
    const std::function<bool(const std::string& name)>& is_extra = {});

}  // namespace tessera::formats
