#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "formats/staging/staged_destination.h"
#include "tessera/base/file_system.h"

namespace tessera::cli {

/// The path that means standard output, for commands that write a file.
inline constexpr const char* kStandardOutput = "-";

/// A text file that is written in several calls, and appears only with `commit`. Create the object
/// before the work whose result is written to it, so that an existing destination is refused early.
/// Not thread-safe.
class OutputFile {
 public:
  /// `option`: the option that gave the path (`--output`), for messages. Throws:
  /// Error(already_exists) if the file exists and `overwrite` is `refuse`; the message names the
  /// flag that replaces the file. Error(invalid_argument) if the path is not a file; Error(io).
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
