#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::zip {

enum class Compression : std::uint8_t { stored, deflated, other };

/// A file inside a zip archive, as the central directory describes it.
struct Member {
  std::string_view name;            // lives as long as the ZipReader
  std::uint64_t nbytes = 0;         // uncompressed
  std::uint64_t stored_nbytes = 0;  // in the archive; equal to `nbytes` if not compressed
  Compression compression = Compression::stored;
  std::uint32_t crc32 = 0;
  ByteRange extent;  // in the file: local header, data, and bytes up to the next member

  /// Says whether there is a CRC to check: torch.save has an option that leaves the CRC 0.
  bool has_crc() const { return crc32 != 0 || nbytes == 0; }
};

/// Returns the eight hex digits in which a CRC-32 is usually shown.
std::string crc_text(std::uint32_t crc);

/// Returns a member's name with its ASCII letters in lower case. torch finds members without regard
/// to case: if it looks for `data/0`, it also takes `Data/0`.
std::string without_case(std::string_view name);

struct ZipLimits {
  std::uint64_t max_members = std::uint64_t{1} << 22;
  std::uint64_t max_directory_nbytes = std::uint64_t{1} << 30;
  std::size_t max_name_nbytes = 1024;
};

/// Reads a zip archive that fills a window of a file: all of a torch.save file, or one of the many
/// archives that follow each other in a .distcp file. Only uncompressed members can be read; torch
/// compresses nothing but TorchScript's code.
///
///     [other bytes]
///     { local header (30+n+m bytes) | data } for each member
///     central directory
///     [zip64 trailer] trailer (22+c bytes)
///
/// The constructor reads and checks the whole central directory: members are within the window and
/// do not overlap, names are unique (also without regard to case), relative and without `..`,
/// nothing is encrypted or split over disks. A member's local header is compared with the directory
/// before the member's first byte is used. A small archive is read in a single call. Immutable
/// after opening; thread-safe. `file` must outlive it. Source: APPNOTE.TXT 6.3.10 (PKWARE).
class ZipReader {
 public:
  /// Throws: Error(corruption), Error(unsupported), Error(io).
  ZipReader(const ReadableFile& file, ByteRange window, ZipLimits limits = {});

  const std::string& path() const { return file_->path(); }
  ByteRange window() const { return window_; }
  /// Returns the number of bytes in the window that are before the archive.
  std::uint64_t nbytes_before() const { return nbytes_before_; }
  /// Returns the members in the order of the central directory.
  const std::vector<Member>& members() const { return members_; }
  /// Returns the index of the member, or nothing. Compares names byte by byte.
  std::optional<std::size_t> find(std::string_view name) const;

  /// Returns the range of the member's data in the file. Throws: Error(corruption) if the local
  /// header contradicts the central directory.
  ByteRange data_range(std::size_t member) const;

  /// Fills `out` with the member's bytes from `offset`. Requires: they are within the member.
  /// Throws: Error(unsupported) if the member is compressed; what data_range throws; Error(io).
  void read_at(std::size_t member, std::uint64_t offset, std::span<std::byte> out) const;

  /// Returns all of the member, and checks its CRC if it has one. Throws: what read_at throws;
  /// Error(corruption) if it has more than `max_nbytes` bytes, or if the CRC is wrong.
  std::vector<char> read_all(std::size_t member, std::uint64_t max_nbytes) const;

  /// Returns the CRC-32 of the member's content, inflated if needed. `on_read`: gets the number of
  /// bytes of each read. Throws: Error(corruption), also for a wrong size; Error(unsupported).
  std::uint32_t compute_crc(std::size_t member,
                            const std::function<void(std::uint64_t nbytes)>& on_read) const;

 private:
  struct Trailer;
  struct Directory;
  Trailer find_trailer() const;
  std::optional<Trailer> find_zip64_trailer(std::uint64_t trailer_begin) const;
  Directory find_directory() const;
  void parse_directory(const Directory& directory, const ZipLimits& limits);
  /// Adds the member whose central header is at the start of `rest`; returns the header's size.
  std::size_t parse_member(std::span<const std::byte> rest, const ZipLimits& limits);
  void check_member(std::size_t member, std::uint16_t flags, std::uint64_t first_disk) const;
  void check_names_without_case() const;
  void place_members(const Directory& directory);
  [[noreturn]] void fail(ErrorKind kind, std::string_view rule, std::string_view expected,
                         std::string_view found, std::string_view likely_cause = {}) const;
  std::string describe(std::size_t member) const;
  void require_stored(std::size_t member) const;
  void read_file_at(std::uint64_t offset, std::span<std::byte> out) const;

  const ReadableFile* file_;
  ByteRange window_;
  std::uint64_t nbytes_before_ = 0;
  std::vector<char> names_;  // of all members, one after the other
  std::vector<Member> members_;
  std::vector<std::uint32_t> by_name_;                        // indices of members_, sorted by name
  std::unique_ptr<std::atomic<std::uint64_t>[]> data_begin_;  // 0: local header not read yet
  std::vector<std::byte> tail_;  // the window's last bytes; all if it is small
};

}  // namespace tessera::formats::zip
