#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::inspect {

/// A range of a file, which must outlive it. A read beyond the range is not refused. Thread-safe.
class FileSlice final : public ReadableFile {
 public:
  /// Requires: `range` is within the file.
  FileSlice(const ReadableFile& file, ByteRange range) : file_(&file), range_(range) {}

  const std::string& path() const override { return file_->path(); }
  std::uint64_t nbytes() const override { return range_.nbytes(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    file_->read_at(range_.begin + offset, out);
  }

 private:
  const ReadableFile* file_;
  ByteRange range_;
};

/// A file whose bytes are in memory. Owns the bytes. Thread-safe.
class BytesFile final : public ReadableFile {
 public:
  BytesFile(std::string path, std::string bytes)
      : path_(std::move(path)), bytes_(std::move(bytes)) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override;

 private:
  std::string path_;
  std::string bytes_;
};

/// Returns the bytes at `offset`: `max_nbytes` of them, or all to the end of the file if fewer.
std::string read_some(const ReadableFile& file, std::uint64_t offset, std::uint64_t max_nbytes);

/// Reads a file from front to back through a small buffer. Skipped bytes that are not in the buffer
/// are never read. The file must outlive the ByteWindow.
class ByteWindow {
 public:
  ByteWindow(const ReadableFile& file, std::uint64_t position)
      : file_(&file), position_(position), nbytes_(file.nbytes()) {}

  std::uint64_t position() const { return position_; }
  std::uint64_t nbytes_left() const { return nbytes_ - position_; }

  /// Returns the next byte, or nothing at the end.
  std::optional<unsigned char> next();
  /// Returns the next `num_bytes` as a little-endian number, or nothing if fewer are left.
  /// Requires: num_bytes <= 8.
  std::optional<std::uint64_t> number(int num_bytes);
  /// Skips `num_bytes` bytes. If fewer are left, moves to the end and returns false.
  bool skip(std::uint64_t num_bytes);
  /// Moves past the next line and returns its range without the line break. If the last line has no
  /// line break, drops its last byte, as Python's unpicklers do.
  ByteRange line();

 private:
  void fill();

  const ReadableFile* file_;
  std::uint64_t position_;
  std::uint64_t nbytes_;
  std::uint64_t buffer_begin_ = 0;
  std::size_t buffer_nbytes_ = 0;
  std::array<std::byte, 16384> buffer_;
};

}  // namespace tessera::inspect
