#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::test {

/// Counts the reads of one file or of several. Thread-safe.
struct ReadCounts {
  std::atomic<std::uint64_t> num_reads = 0;
  std::atomic<std::uint64_t> nbytes = 0;
};

/// A file in memory that counts its reads. Thread-safe.
class MemoryFile final : public ReadableFile {
 public:
  explicit MemoryFile(std::string bytes)
      : path_("memory"), own_bytes_(std::move(bytes)), bytes_(own_bytes_), reads_(own_reads_) {}
  /// `bytes` and `reads` must outlive the file.
  MemoryFile(std::string path, const std::string& bytes, ReadCounts& reads)
      : path_(std::move(path)), bytes_(bytes), reads_(reads) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    ++reads_.num_reads;
    reads_.nbytes += out.size();
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
      throw Error(ErrorKind::corruption,
                  {.path = path_, .byte_range = ByteRange{offset, offset + out.size()}},
                  "the file ends before this range");
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

  std::uint64_t num_reads() const { return reads_.num_reads; }
  std::uint64_t num_bytes_read() const { return reads_.nbytes; }

 private:
  std::string path_;
  std::string own_bytes_;
  ReadCounts own_reads_;
  const std::string& bytes_;
  ReadCounts& reads_;
};

}  // namespace tessera::test
