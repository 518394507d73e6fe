#pragma once

#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::test {

/// A file whose bytes are given, which counts the reads of it. Thread-safe.
class MemoryFile final : public ReadableFile {
 public:
  explicit MemoryFile(std::string bytes, std::string path = "memory")
      : path_(std::move(path)), bytes_(std::move(bytes)) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    ++num_reads_;
    num_bytes_read_ += out.size();
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
      throw Error(ErrorKind::corruption,
                  {.path = path_, .byte_range = ByteRange{offset, offset + out.size()}},
                  "the file ends before");
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

  int num_reads() const { return num_reads_; }
  std::uint64_t num_bytes_read() const { return num_bytes_read_; }

 private:
  std::string path_;
  std::string bytes_;
  mutable std::atomic<int> num_reads_ = 0;
  mutable std::atomic<std::uint64_t> num_bytes_read_ = 0;
};

}  // namespace tessera::test
