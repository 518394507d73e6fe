#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/read_only_file_system.h"

namespace tessera::fuzz {

/// The path under which the files of one fuzzer input appear.
inline constexpr const char* kCheckpointPath = "/checkpoint";

/// A read-only directory `/checkpoint` in memory. Its files are parts of one fuzzer input:
///
///     { 4 bytes little-endian: nbytes | bytes } for each name; the last file has only bytes
///
/// If the input ends early, the files whose length is missing do not exist. If the only name is
/// empty, `/checkpoint` itself is the file. pack_seeds.py writes inputs of this layout.
/// Does not copy the input, which must outlive it. Thread-safe. Writes throw Error(io).
class PackedFiles final : public ReadOnlyFileSystem {
 public:
  PackedFiles(std::span<const std::byte> input, std::vector<std::string> names);

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override;

 private:
  const std::span<const std::byte>* find(const std::string& path) const;
  std::set<std::string> names_within(const std::string& folder) const;

  std::vector<std::pair<std::string, std::span<const std::byte>>> files_;  // by full path
};

}  // namespace tessera::fuzz
