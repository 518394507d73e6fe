#include "formats/zip/zip_layout.h"

#include <bit>
#include <limits>
#include <utility>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::formats::zip {
namespace {

constexpr std::uint32_t kDirectoryEntrySignature = 0x02014b50;
constexpr std::uint32_t kEndSignature = 0x06054b50;
constexpr std::uint32_t kZip64EndSignature = 0x06064b50;

constexpr std::uint64_t kZip64SizesNbytes = 2 + 2 + 8 + 8;  // id, length, two sizes
constexpr std::uint64_t kPaddingHeaderNbytes = 2 + 2;       // id, length
constexpr std::uint64_t kZip64EndNbytes = 56;

constexpr std::uint16_t kPaddingExtraId = 0x4246;  // "FB"
constexpr std::uint16_t kUtf8Names = 0x0800;       // general purpose bit 11
constexpr std::uint16_t kVersionStored = 10;
constexpr std::uint16_t kVersionZip64 = 45;
constexpr std::uint64_t kMax16 = std::numeric_limits<std::uint16_t>::max();
constexpr std::uint64_t kMax32 = std::numeric_limits<std::uint32_t>::max();

bool needs_zip64(std::uint64_t value) {
  return value >= kMax32;
}

template <class Unsigned>
void append(std::string& out, Unsigned value) {
  for (std::size_t i = 0; i < sizeof(Unsigned); ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}

/// Appends `value` as a 32-bit field. A value that does not fit is written as 0xffffffff; then a
/// zip64 field holds it.
void append_or_zip64(std::string& out, std::uint64_t value) {
  append(out, static_cast<std::uint32_t>(needs_zip64(value) ? kMax32 : value));
}

/// The fields that a member has both in its local header and in its directory entry.
struct SharedFields {
  std::uint16_t version_needed;
  std::uint32_t crc;
  std::uint64_t nbytes;
  std::size_t name_nbytes;
  std::uint64_t extra_nbytes;
};

void append_shared_fields(std::string& out, const SharedFields& fields) {
  append(out, fields.version_needed);
  append(out, kUtf8Names);
  append(out, std::uint16_t{0});  // stored
  append(out, std::uint32_t{0});  // time and date
  append(out, fields.crc);
  append_or_zip64(out, fields.nbytes);  // compressed
  append_or_zip64(out, fields.nbytes);
  append(out, static_cast<std::uint16_t>(fields.name_nbytes));
  append(out, static_cast<std::uint16_t>(fields.extra_nbytes));
}

void append_zip64_end_record(std::string& out, std::uint64_t num_members, ByteRange directory) {
  append(out, kZip64EndSignature);
  append(out, kZip64EndNbytes - 12);  // bytes that follow
  append(out, kVersionZip64);
  append(out, kVersionZip64);
  append(out, std::uint32_t{0});  // this disk
  append(out, std::uint32_t{0});  // the directory's disk
  append(out, num_members);
  append(out, num_members);
  append(out, directory.nbytes());
  append(out, directory.begin);
}

void append_zip64_locator(std::string& out, std::uint64_t zip64_end_record_begin) {
  append(out, kZip64LocatorSignature);
  append(out, std::uint32_t{0});
  append(out, zip64_end_record_begin);
  append(out, std::uint32_t{1});  // disks
}

/// Appends the records after the central directory, whose place in the archive is `directory`.
void append_end_records(std::string& out, std::uint64_t num_members, ByteRange directory) {
  if (num_members >= kMax16 || needs_zip64(directory.nbytes()) || needs_zip64(directory.begin)) {
    append_zip64_end_record(out, num_members, directory);
    append_zip64_locator(out, directory.end);
  }
  append(out, kEndSignature);
  append(out, std::uint16_t{0});
  append(out, std::uint16_t{0});
  append(out, static_cast<std::uint16_t>(std::min(num_members, kMax16)));
  append(out, static_cast<std::uint16_t>(std::min(num_members, kMax16)));
  append_or_zip64(out, directory.nbytes());
  append_or_zip64(out, directory.begin);
  append(out, std::uint16_t{0});  // comment
}

}  // namespace

std::size_t ZipLayout::add_member(std::string name, std::uint64_t nbytes, std::uint64_t alignment) {
  TESSERA_CHECK(std::has_single_bit(alignment) && alignment <= 16384);
  TESSERA_CHECK(name.size() <= kMax16);
  const std::uint64_t unpadded = members_end_ + kLocalHeaderNbytes + name.size() +
                                 (needs_zip64(nbytes) ? kZip64SizesNbytes : 0) +
                                 kPaddingHeaderNbytes;
  const std::uint64_t data_begin = round_up(unpadded, alignment);
  members_.push_back({std::move(name), members_end_, {data_begin, data_begin + nbytes}});
  members_end_ = data_begin + nbytes;
  return members_.size() - 1;
}

ByteRange ZipLayout::header_range(std::size_t member) const {
  return {members_[member].header_begin, members_[member].data.begin};
}

ByteRange ZipLayout::data_range(std::size_t member) const {
  return members_[member].data;
}

std::string ZipLayout::local_header(std::size_t member, std::uint32_t crc) const {
  const Member& m = members_[member];
  const std::uint64_t nbytes = m.data.nbytes();
  const bool zip64 = needs_zip64(nbytes);
  const std::uint64_t extra_nbytes =
      m.data.begin - m.header_begin - kLocalHeaderNbytes - m.name.size();
  std::string out;
  append(out, kLocalHeaderSignature);
  append_shared_fields(
      out, {zip64 ? kVersionZip64 : kVersionStored, crc, nbytes, m.name.size(), extra_nbytes});
  out += m.name;
  if (zip64) {
    append(out, kZip64ExtraId);
    append(out, static_cast<std::uint16_t>(kZip64SizesNbytes - 4));
    append(out, nbytes);
    append(out, nbytes);
  }
  const std::uint64_t padding =
      extra_nbytes - (zip64 ? kZip64SizesNbytes : 0) - kPaddingHeaderNbytes;
  append(out, kPaddingExtraId);
  append(out, static_cast<std::uint16_t>(padding));
  out.append(padding, 'Z');
  return out;
}

std::string ZipLayout::directory(std::span<const std::uint32_t> crcs) const {
  TESSERA_CHECK(crcs.size() == members_.size());
  std::string out;
  for (std::size_t i = 0; i < members_.size(); ++i) append_entry(out, members_[i], crcs[i]);
  append_end_records(out, members_.size(), {directory_begin(), directory_begin() + out.size()});
  return out;
}

void ZipLayout::append_entry(std::string& out, const Member& m, std::uint32_t crc) {
  const std::uint64_t nbytes = m.data.nbytes();
  std::string zip64;
  if (needs_zip64(nbytes)) {
    append(zip64, nbytes);
    append(zip64, nbytes);
  }
  if (needs_zip64(m.header_begin)) append(zip64, m.header_begin);
  const std::uint16_t version = zip64.empty() ? kVersionStored : kVersionZip64;
  append(out, kDirectoryEntrySignature);
  append(out, version);  // made by
  const std::uint64_t extra_nbytes = zip64.empty() ? 0 : 4 + zip64.size();
  append_shared_fields(out, {version, crc, nbytes, m.name.size(), extra_nbytes});
  append(out, std::uint16_t{0});  // comment
  append(out, std::uint16_t{0});  // disk
  append(out, std::uint16_t{0});  // internal attributes
  append(out, std::uint32_t{0});  // external attributes
  append_or_zip64(out, m.header_begin);
  out += m.name;
  if (!zip64.empty()) {
    append(out, kZip64ExtraId);
    append(out, static_cast<std::uint16_t>(zip64.size()));
    out += zip64;
  }
}

}  // namespace tessera::formats::zip
