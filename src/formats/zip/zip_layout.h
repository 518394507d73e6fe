#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::formats::zip {

inline constexpr std::uint32_t kLocalHeaderSignature = 0x04034b50;
inline constexpr std::uint32_t kZip64LocatorSignature = 0x07064b50;
inline constexpr std::uint64_t kLocalHeaderNbytes = 30;
inline constexpr std::uint16_t kZip64ExtraId = 0x0001;

/// The layout of a zip archive of stored (uncompressed) members of known sizes. All places are
/// known before anything is written, so members can be written in any order and by several threads.
/// Headers hold the CRCs, so they are written last.
///
/// ```
/// local header 0 | name | extra: zip64 sizes?, padding | data 0
/// local header 1 | ...
/// central directory | zip64 end record and locator? | end record
/// ```
/// The padding (extra field `FB`, as PyTorch calls it) makes each member's data begin at a multiple
/// of its alignment within the archive. Dates are zero; zip64 fields appear only if needed.
/// Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.
/// Immutable once all members are added; then safe to share between threads.
class ZipLayout {
 public:
  /// Requires: `alignment` is a power of two, at most 16384.
  explicit ZipLayout(std::uint64_t alignment = 64) : alignment_(alignment) {}

  /// Appends a member and returns its index. Requires: a name shorter than 64 KiB.
  std::size_t add_member(std::string name, std::uint64_t nbytes) {
    return add_member(std::move(name), nbytes, alignment_);
  }
  /// Does the same for a member with an alignment of its own. Requires: as for the constructor.
  std::size_t add_member(std::string name, std::uint64_t nbytes, std::uint64_t alignment);

  std::size_t num_members() const { return members_.size(); }
  const std::string& name(std::size_t member) const { return members_[member].name; }
  /// Returns the ranges of the member's header and data within the archive.
  ByteRange header_range(std::size_t member) const;
  ByteRange data_range(std::size_t member) const;
  /// Returns where the central directory begins: at the end of the last member.
  std::uint64_t directory_begin() const { return members_end_; }

  /// Returns the bytes of `header_range(member)`.
  std::string local_header(std::size_t member, std::uint32_t crc) const;
  /// Returns all bytes from `directory_begin()` to the archive's end. `crcs`: one for each member.
  std::string directory(std::span<const std::uint32_t> crcs) const;

 private:
  struct Member {
    std::string name;
    std::uint64_t header_begin;
    ByteRange data;
  };
  static void append_entry(std::string& out, const Member& m, std::uint32_t crc);

  std::uint64_t alignment_;
  std::uint64_t members_end_ = 0;
  std::vector<Member> members_;
};

}  // namespace tessera::formats::zip
