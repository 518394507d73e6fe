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

/// The path that means standard input.
inline constexpr const char* kStandardInput = "-";

/// Presents standard input as a file system with one file, `-`, for reading only. The constructor
/// reads the stream to its end: it keeps the first `max_kept_nbytes` bytes, and only counts the
/// rest. If there is such a rest, and it goes on after the end that the file's header gives, the
/// constructor throws Error(corruption); so an endless stream does not block it. Thread-safe. A
/// read of a byte that was not kept throws Error(unsupported), a write throws Error(io).
class StandardInput final : public ReadOnlyFileSystem {
 public:
  /// More than the longest header of a safetensors file.
  static constexpr std::uint64_t kMaxKeptNbytes = std::uint64_t{128} << 20;

  /// Reads from a file descriptor, which the caller owns. Throws: Error(invalid_argument) for a
  /// terminal; what detect_format throws on the first 1024 bytes; Error(unsupported) if the index
  /// is at the end of a stream of more than `max_kept_nbytes`; Error(corruption); Error(io).
  explicit StandardInput(int descriptor, std::uint64_t max_kept_nbytes = kMaxKeptNbytes);

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override;

 private:
  enum class Stream { more, ended };
  /// Reads on until this and earlier calls have read `nbytes` bytes, or until the stream ends.
  Stream read_to(std::uint64_t nbytes);

  int descriptor_;
  std::uint64_t max_kept_nbytes_;
  std::uint64_t nbytes_ = 0;
  std::vector<std::byte> kept_;
};

/// Reads a whole file as text. The file may also be standard input (`-`) or a pipe. Calls
/// `check_begin` with the first 4096 bytes, or all of a shorter file, before reading much. Throws:
/// as read_file, and as `check_begin`; Error(invalid_argument) if standard input is a terminal.
std::string read_text(const std::string& path, std::uint64_t max_nbytes,
                      const std::function<void(std::string_view)>& check_begin);

}  // namespace tessera::cli
