#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/partly_read.h"
#include "formats/torch_zip/storages.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_zip {

/// Compares what is read from the storages of one file with their CRCs. There is one CRC for each
/// storage, so this class keeps the ranges that have been read, with a CRC for each, until all
/// bytes of the storage have been read. Thread-safe.
class StorageChecks {
 public:
  /// One range that was read of a storage, and its CRC.
  struct PartRead {
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t nbytes;       // of the storage
    std::uint64_t nbytes_read;  // as in Check
    std::uint32_t storage;
    std::uint32_t crc;
  };

  StorageChecks() = default;
  explicit StorageChecks(const PartRead& part);

  /// Returns the range if this object has exactly one, of one storage; otherwise returns nothing.
  std::optional<PartRead> only_part() const;

  /// Adds bytes that were read from the offset `begin` of a storage. Bytes that were added before
  /// count once. Compares the CRC when all bytes of the storage have been added.
  /// Throws: Error(corruption) with `path` and the range of the storage.
  void add(const Storages& storages, const std::string& path, std::size_t storage,
           std::uint64_t begin, std::span<const std::byte> bytes);
  /// Whether a storage was read only in part, so that its CRC is not compared yet.
  bool has_rest() const;
  /// Whether `check_rest` would read the rest of a storage. `most_rest`: as in RestOptions.
  bool has_rest_to_check(double most_rest) const;
  /// Reads the rest of storages that were read in part, as `options` allow, and compares the CRCs.
  void check_rest(const Storages& storages, const std::string& path, const RestOptions& options);

 private:
  struct Check {
    // begin -> end, CRC. No two are adjacent.
    std::map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> ranges;
    std::uint64_t nbytes = 0;       // of the storage
    std::uint64_t nbytes_read = 0;  // by all reads together, also of bytes that were read before
    bool is_done = false;
  };
  static std::vector<ByteRange> missing_in(const Check& check, ByteRange range);
  static bool is_rest_small(const Check& check, double most_rest);
  void add(const Storages& storages, const std::string& path, std::size_t storage,
           std::uint64_t begin, std::span<const std::byte> bytes, std::size_t max_ranges);
  bool add_range(const Storages& storages, const std::string& path, std::size_t storage,
                 ByteRange range, std::uint32_t crc);

  mutable std::mutex mutex_;
  std::map<std::size_t, Check> checks_;  // key: number of the storage
};

/// The checks of files that are opened again and again: keeps those of files that were read only in
/// part. A move may read one part of many files and the rest later, so a file with one range read
/// takes only a PartRead. If two threads read a file at the same time, the range that one of them
/// has read may be lost; then `check_rest` reads it again. Thread-safe.
class ChecksOfFiles {
 public:
  /// Returns the checks of the file with this number: those that are kept, or new ones.
  std::shared_ptr<StorageChecks> of(std::uint64_t file);
  /// Keeps the checks if `has_rest` is true; otherwise drops them. Call this after each read.
  void keep(std::uint64_t file, std::shared_ptr<StorageChecks> checks);
  /// Returns the numbers of the files of which `check_rest` would check a storage.
  std::vector<std::uint64_t> files_to_check(double most_rest) const;

 private:
  mutable std::mutex mutex_;
  // A file is in at most one of the two.
  std::unordered_map<std::uint64_t, std::shared_ptr<StorageChecks>> kept_;
  std::unordered_map<std::uint64_t, StorageChecks::PartRead> parts_;
};

}  // namespace tessera::formats::torch_zip
