#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/read_only_file_system.h"

namespace tessera::cli {

/// What stands for standard input where a path is expected.
inline constexpr const char* kStandardInput = "-";

/// A stream as a file system that has one file, `-`, for reading only. Its first bytes are read and
/// kept on construction, which is enough for the header of a file of any size, and the rest is
/// counted: up to the end that the header lays out and not beyond, so that a stream without end is
/// not read for ever. Thread-safe. What needs a byte that was not kept throws Error(unsupported),
/// what would write Error(io).
class StandardInput final : public ReadOnlyFileSystem {
 public:
  /// More than the longest header of a safetensors file.
  static constexpr std::uint64_t kMaxKeptNbytes = std::uint64_t{128} << 20;

  /// Reads from a file descriptor, which stays the caller's.
  /// Throws: Error(invalid_argument) where it is a terminal; Error(unsupported), or what
  /// detect_format throws, as soon as the stream is found to be none that can be read; Error(io).
  explicit StandardInput(int descriptor, std::uint64_t max_kept_nbytes = kMaxKeptNbytes);

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override;

 private:
  enum class Stream { more, ended };
  /// Reads until there are `nbytes`, or the stream ends.
  Stream read_to(std::uint64_t nbytes);

  int descriptor_;
  std::uint64_t max_kept_nbytes_;
  std::uint64_t nbytes_ = 0;
  std::vector<std::byte> kept_;
};

/// Returns all of a file as text. Beside files, standard input (`-`), pipes and the like are read.
/// `check_begin` is given its first 4096 bytes, or all where it is shorter, before more is read.
/// Throws: as read_file, and as `check_begin`; Error(invalid_argument) where standard input is a
/// terminal.
std::string read_text(const std::string& path, std::uint64_t max_nbytes,
                      const std::function<void(std::string_view)>& check_begin);

}  // namespace tessera::cli
