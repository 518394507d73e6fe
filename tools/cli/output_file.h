#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "formats/staging/staged_destination.h"
#include "tessera/base/file_system.h"

namespace tessera::cli {

/// What stands for standard output where a command takes it as a file to write.
inline constexpr const char* kStandardOutput = "-";

/// Writes a file in parts, which appears whole with `commit`, or not at all. Made before the work
/// whose result it takes, so that a destination in the way shows early. Not thread-safe.
class OutputFile {
 public:
  /// `option` is how the path was given (`--output`), for messages.
  /// Throws: Error(already_exists) where a file is there and `overwrite` is refuse, with the flag
  /// that would replace it; Error(invalid_argument) where something else is; Error(io).
  OutputFile(FileSystem& fs, const std::string& path, OverwritePolicy overwrite,
             std::string_view option);

  void write(std::string_view text);  // Throws: Error(io)
  void commit();

  std::uint64_t nbytes() const { return flushed_nbytes_ + buffer_.size(); }

 private:
  void flush();

  formats::StagedDestination staged_;
  std::unique_ptr<WritableFile> file_;
  std::string buffer_;
  std::uint64_t flushed_nbytes_ = 0;
};

}  // namespace tessera::cli
