#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"

namespace tessera::formats {

/// Checks and throws as `check_replaceable` of detect.h does. In a directory, also accepts a file
/// whose name and bytes equal those of one of `extra_files`.
void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option,
                       const std::vector<ExtraFile>& extra_files);

/// Throws Error(invalid_argument): the file or directory at `path` must not be replaced. `option`:
/// the option that asks to replace it. The message names this option.
[[noreturn]] void refuse_to_replace(const std::string& path, const std::string& option,
                                    std::string_view expected, std::string_view found);

/// Throws Error(invalid_argument): the directory must not be replaced, because its entry `name`
/// does not belong to the checkpoint. `option`: as for refuse_to_replace.
[[noreturn]] void refuse_foreign_file(const std::string& directory, const std::string& name,
                                      const std::string& option);

}  // namespace tessera::formats
