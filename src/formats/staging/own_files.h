#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {

/// Which names belong to a checkpoint's files, also while it is being written.
enum class FileNames {
  of_our_writers,     // of all formats
  of_one_checkpoint,  // by any writer, of the one format that the names show
};

/// Whether the entry `name` of a directory is a file that a writer of Tessera makes, of any format.
bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name);

/// Whether a regular file, not a link, has this name.
bool is_plain_file(const std::string& path);

/// Returns those of the names in a checkpoint's directory that are the checkpoint's by its index:
/// the index itself, the files that it names, and empty ones (older PyTorch makes a file for a rank
/// that saves nothing). If the index cannot be read, all that the format may own. Opens the
/// checkpoint unless `opened` has the files that an open reader knows.
std::vector<std::string> files_by_index(const FormatDriver& driver, std::string_view index_name,
                                        const FileSystem& fs, const std::string& directory,
                                        const std::vector<std::string>& names,
                                        const std::set<std::string>& opened);

/// Returns the first name in a directory that is not a checkpoint's file. `is_extra`, if given,
/// accepts names of other files.
std::optional<std::string> first_foreign_entry(
    const FileSystem& fs, const std::string& directory, FileNames names,
    const std::function<bool(const std::string& name)>& is_extra = {});

}  // namespace tessera::formats
