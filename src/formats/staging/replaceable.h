#pragma once

#include <string>
#include <string_view>

namespace tessera::formats {

/// Throws Error(invalid_argument): what lies at `path` must not be replaced. `option` is what asked
/// to replace it.
[[noreturn]] void refuse_to_replace(const std::string& path, const std::string& option,
                                    std::string_view expected, std::string_view found);

/// Throws Error(invalid_argument): a directory holds more than one checkpoint's files.
[[noreturn]] void refuse_foreign_file(const std::string& directory, const std::string& name,
                                      const std::string& option);

}  // namespace tessera::formats
