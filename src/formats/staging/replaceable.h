#pragma once

#include <string>
#include <string_view>

namespace tessera::formats {

/// Throws Error(invalid_argument): what is at `path` must not be replaced. `option` names the
/// option that asks to replace it.
[[noreturn]] void refuse_to_replace(const std::string& path, const std::string& option,
                                    std::string_view expected, std::string_view found);

/// Throws Error(invalid_argument): a directory holds more than the files of one checkpoint.
[[noreturn]] void refuse_foreign_file(const std::string& directory, const std::string& name,
                                      const std::string& option);

}  // namespace tessera::formats
