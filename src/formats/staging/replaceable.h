#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"

namespace tessera::formats {

/// Checks and throws as `check_replaceable` of detect.h does. In a directory, also accepts a file
/// whose name and bytes equal those of one of `extra_files`. At a URL, also accepts what an
/// interrupted run may have left, unless only extra files are there: what is_interrupted_write
/// accepts, and files of DeepSpeed's universal checkpoint without `latest_universal`.
void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option,
                       const std::vector<ExtraFile>& extra_files);

/// Whether the folder at the URL `url` holds only what an interrupted run of Tessera left: files
/// that Tessera writes, and files that are equal to one of `extra_files`. The folder is marked as
/// incomplete, or lacks the file without which readers find no checkpoint. Returns false for files
/// without the mark that may be a complete checkpoint (may_be_whole_without_index).
bool is_interrupted_write(const std::string& url, const std::vector<ExtraFile>& extra_files);

/// Throws Error(already_exists): an interrupted run has left a part of a checkpoint at `url`.
[[noreturn]] void refuse_interrupted_write(const std::string& url);

/// Throws Error(invalid_argument): the file or directory at `path` must not be replaced. `option`:
/// the option that asks to replace it. The message names this option.
[[noreturn]] void refuse_to_replace(const std::string& path, const std::string& option,
                                    std::string_view expected, std::string_view found);

/// Throws Error(invalid_argument): the directory must not be replaced, because its entry `name`
/// does not belong to the checkpoint. `option`: as for refuse_to_replace.
[[noreturn]] void refuse_foreign_file(const std::string& directory, const std::string& name,
                                      const std::string& option);

}  // namespace tessera::formats
