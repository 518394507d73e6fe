#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/read_only_file_system.h"
#include "support/memory_file.h"

namespace tessera::test {

/// The files of one directory, in memory and read-only, so that tests can damage them and count
/// reads. Thread-safe for reading.
class MemoryFiles final : public ReadOnlyFileSystem {
 public:
  MemoryFiles(std::string directory, std::map<std::string, std::string> files)
      : directory_(std::move(directory)), files_(std::move(files)) {}

  /// Returns a file's bytes, so that a test can change them before they are read.
  std::string& operator[](const std::string& name) { return files_[name]; }
  const std::map<std::string, std::string>& files() const { return files_; }
  void remove(const std::string& name) { files_.erase(name); }

  struct Reads {
    std::uint64_t nbytes = 0;
    std::uint64_t num_reads = 0;
  };
  /// Returns the number of reads since the last call of this function, and their bytes.
  Reads take_reads() const;

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override { return path; }

 private:
  const std::string* find(const std::string& path) const;

  std::string directory_;
  std::map<std::string, std::string> files_;
  mutable ReadCounts reads_;
};

}  // namespace tessera::test
