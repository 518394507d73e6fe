#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/read_only_file_system.h"

namespace tessera::cli {

/// What stands for standard input where a path is expected.
inline constexpr const char* kStandardInput = "-";

/// A stream as a file system that has one file, `-`, for reading only. The stream is read to its
/// end on construction: so many of its first bytes are kept, the rest is counted, which is enough
/// for the header of a file of any size. Thread-safe. What needs a byte that was not kept throws
/// Error(unsupported), what would write Error(io).
class StandardInput final : public ReadOnlyFileSystem {
 public:
  /// More than the longest header of a safetensors file.
  static constexpr std::uint64_t kMaxKeptNbytes = std::uint64_t{128} << 20;

  /// Reads from a file descriptor, which stays the caller's.
  /// Throws: Error(invalid_argument) where it is a terminal; Error(io).
  explicit StandardInput(int descriptor, std::uint64_t max_kept_nbytes = kMaxKeptNbytes);

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override;

 private:
  std::uint64_t nbytes_ = 0;
  std::vector<std::byte> kept_;
};

}  // namespace tessera::cli
