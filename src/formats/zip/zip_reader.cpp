#include "formats/zip/zip_reader.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>

#include "base/checked_math.h"
#include "base/digest.h"
#include "formats/zip/zip_layout.h"

namespace tessera::formats::zip {
namespace {

constexpr std::uint64_t kTrailerNbytes = 22;
constexpr std::uint64_t kZip64LocatorNbytes = 20;
constexpr std::uint64_t kZip64TrailerNbytes = 56;
constexpr std::uint64_t kCentralHeaderNbytes = 46;
constexpr std::uint64_t kMaxCommentNbytes = 0xffff;

constexpr std::uint32_t kTrailerSignature = 0x06054b50;
constexpr std::uint32_t kZip64TrailerSignature = 0x06064b50;
constexpr std::uint32_t kCentralHeaderSignature = 0x02014b50;

constexpr std::uint16_t kEncryptedFlags = 1U << 0 | 1U << 6 | 1U << 13;
constexpr std::uint16_t kSizesFollowFlag = 1U << 3;  // the sizes are after the data

constexpr std::uint64_t kSmallWindowNbytes = 64 * 1024;
constexpr std::uint64_t kTailNbytes = 8 * 1024;
constexpr std::size_t kBlockNbytes = std::size_t{1} << 20;

template <std::unsigned_integral T>
T little_endian(std::span<const std::byte> bytes, std::size_t offset) {
  T value = 0;
  for (std::size_t i = sizeof(T); i-- > 0;) {
    value = static_cast<T>(value << 8 | std::to_integer<T>(bytes[offset + i]));
  }
  return value;
}
constexpr auto u16 = little_endian<std::uint16_t>;
constexpr auto u32 = little_endian<std::uint32_t>;
constexpr auto u64 = little_endian<std::uint64_t>;

std::string_view text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Compression compression_of(std::uint16_t method) {
  if (method == 0) return Compression::stored;
  return method == 8 ? Compression::deflated : Compression::other;
}

bool is_trailer(std::span<const std::byte> bytes) {
  return bytes.size() >= kTrailerNbytes && u32(bytes, 0) == kTrailerSignature &&
         u16(bytes, 20) == bytes.size() - kTrailerNbytes;
}

/// Returns the position of the trailer (the end-of-central-directory record) within the archive's
/// last bytes; nothing if there is none.
std::optional<std::size_t> trailer_position(std::span<const std::byte> end) {
  const std::uint64_t max_back =
      std::min<std::uint64_t>(end.size(), kTrailerNbytes + kMaxCommentNbytes);
  for (std::uint64_t back = kTrailerNbytes; back <= max_back; ++back) {
    if (is_trailer(end.last(back))) return end.size() - back;
  }
  return std::nullopt;
}

/// Sets the numbers that did not fit into their 32-bit fields, from the extra field `zip64`, which
/// holds only these numbers, in the order in which this function reads them.
void apply_zip64_fields(std::span<const std::byte> extra, Member& member,
                        std::uint64_t& first_disk) {
  while (extra.size() >= 4) {
    const std::size_t field_nbytes = u16(extra, 2);
    if (field_nbytes > extra.size() - 4) break;
    if (u16(extra, 0) == kZip64ExtraId) {
      std::span<const std::byte> field = extra.subspan(4, field_nbytes);
      for (std::uint64_t* wide : {&member.nbytes, &member.stored_nbytes, &member.extent.begin}) {
        if (*wide != 0xffffffff) continue;
        if (field.size() < 8) break;
        *wide = u64(field, 0);
        field = field.subspan(8);
      }
      if (first_disk == 0xffff && field.size() >= 4) first_disk = u32(field, 0);
    }
    extra = extra.subspan(4 + field_nbytes);
  }
}

}  // namespace

std::string crc_text(std::uint32_t crc) {
  std::string digits;
  for (int shift = 28; shift >= 0; shift -= 4) digits += "0123456789abcdef"[crc >> shift & 0xf];
  return digits;
}

std::string without_case(std::string_view name) {
  std::string lower(name);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

/// The fields of the end-of-directory record, plain or zip64.
struct ZipReader::Trailer {
  std::uint64_t begin = 0;  // in the file
  std::uint64_t disk = 0;
  std::uint64_t first_disk = 0;
  std::uint64_t num_members_on_disk = 0;
  std::uint64_t num_members = 0;
  std::uint64_t directory_nbytes = 0;
  std::uint64_t directory_begin = 0;  // in the archive
};

struct ZipReader::Directory {
  std::uint64_t begin = 0;  // in the file
  std::uint64_t nbytes = 0;
  std::uint64_t num_members = 0;
  std::uint64_t base = 0;  // position in the file from which offsets in the archive count
};

void ZipReader::fail(ErrorKind kind, std::string_view rule, std::string_view expected,
                     std::string_view found, std::string_view likely_cause) const {
  throw Error::expected(kind, {.path = path(), .byte_range = window_}, "zip " + std::string(rule),
                        expected, found, likely_cause);
}

std::string ZipReader::describe(std::size_t member) const {
  return "member '" + printable(members_[member].name, 80) + "'";
}

ZipReader::ZipReader(const ReadableFile& file, ByteRange window, ZipLimits limits)
    : file_(&file), window_(window) {
  TESSERA_CHECK(window.begin <= window.end);
  if (window.end > file.nbytes()) {
    fail(ErrorKind::corruption, "archive", "to end at byte " + std::to_string(window.end),
         "a file of " + std::to_string(file.nbytes()) + " bytes", "cut short?");
  }
  const std::uint64_t nbytes = window.nbytes();
  tail_.resize(nbytes <= kSmallWindowNbytes ? nbytes : kTailNbytes);
  file.read_at(window.end - tail_.size(), tail_);
  const Directory directory = find_directory();
  if (directory.nbytes > limits.max_directory_nbytes) {
    fail(ErrorKind::corruption, "directory",
         "at most " + std::to_string(limits.max_directory_nbytes) + " bytes",
         std::to_string(directory.nbytes));
  }
  nbytes_before_ = directory.base - window.begin;
  parse_directory(directory, limits);
  place_members(directory);
  data_begin_ = std::make_unique<std::atomic<std::uint64_t>[]>(members_.size());
}

void ZipReader::read_file_at(std::uint64_t offset, std::span<std::byte> out) const {
  const std::uint64_t tail_begin = window_.end - tail_.size();
  if (offset < tail_begin || out.size() > window_.end - offset) return file_->read_at(offset, out);
  std::copy_n(tail_.begin() + static_cast<std::ptrdiff_t>(offset - tail_begin), out.size(),
              out.begin());
}

// Returns the trailer, the last record of the archive. It ends with a comment of any length.
ZipReader::Trailer ZipReader::find_trailer() const {
  const std::uint64_t nbytes = window_.nbytes();
  std::vector<std::byte> end_bytes;
  std::span<const std::byte> end = tail_;
  std::optional<std::size_t> position = trailer_position(end);
  if (!position && tail_.size() < nbytes) {
    end_bytes.resize(std::min(
        nbytes, kTrailerNbytes + kMaxCommentNbytes + kZip64LocatorNbytes + kZip64TrailerNbytes));
    file_->read_at(window_.end - end_bytes.size(), end_bytes);
    end = end_bytes;
    position = trailer_position(end);
  }
  if (!position) {
    fail(ErrorKind::corruption, "archive", "an end-of-directory record at its end", "none",
         nbytes == 0 ? "an empty file" : "is it cut short, or not a zip archive?");
  }
  const std::span<const std::byte> bytes = end.subspan(*position, kTrailerNbytes);
  return {.begin = window_.end - end.size() + *position,
          .disk = u16(bytes, 4),
          .first_disk = u16(bytes, 6),
          .num_members_on_disk = u16(bytes, 8),
          .num_members = u16(bytes, 10),
          .directory_nbytes = u32(bytes, 12),
          .directory_begin = u32(bytes, 16)};
}

// Returns the zip64 trailer (a trailer with 64-bit numbers); nothing if the archive is not zip64. A
// zip64 archive has the zip64 trailer, then a locator, then the normal trailer.
std::optional<ZipReader::Trailer> ZipReader::find_zip64_trailer(std::uint64_t trailer_begin) const {
  if (trailer_begin - window_.begin < kZip64LocatorNbytes) return std::nullopt;
  const std::uint64_t locator_begin = trailer_begin - kZip64LocatorNbytes;
  std::array<std::byte, kZip64LocatorNbytes> locator;
  read_file_at(locator_begin, locator);
  if (u32(locator, 0) != kZip64LocatorSignature) return std::nullopt;

  Trailer trailer;
  std::array<std::byte, kZip64TrailerNbytes> bytes{};
  if (locator_begin - window_.begin >= kZip64TrailerNbytes) {
    trailer.begin = locator_begin - kZip64TrailerNbytes;
    read_file_at(trailer.begin, bytes);
  }
  if (u32(bytes, 0) != kZip64TrailerSignature || u64(bytes, 4) != kZip64TrailerNbytes - 12) {
    fail(ErrorKind::corruption, "archive", "a zip64 end-of-directory record before its locator",
         "none");
  }
  trailer.disk = u32(bytes, 16);
  trailer.first_disk = u32(bytes, 20);
  trailer.num_members_on_disk = u64(bytes, 24);
  trailer.num_members = u64(bytes, 32);
  trailer.directory_nbytes = u64(bytes, 40);
  trailer.directory_begin = u64(bytes, 48);
  return trailer;
}

ZipReader::Directory ZipReader::find_directory() const {
  Trailer trailer = find_trailer();
  if (const auto zip64 = find_zip64_trailer(trailer.begin)) trailer = *zip64;
  if (trailer.disk != 0 || trailer.first_disk != 0 ||
      trailer.num_members_on_disk != trailer.num_members) {
    fail(ErrorKind::unsupported, "archive", "one disk", "an archive split over several disks");
  }
  const auto stated_end = checked_add(trailer.directory_begin, trailer.directory_nbytes);
  if (!stated_end || *stated_end > trailer.begin - window_.begin) {
    fail(ErrorKind::corruption, "directory",
         "to end by byte " + std::to_string(trailer.begin - window_.begin),
         std::to_string(trailer.directory_nbytes) + " bytes at " +
             std::to_string(trailer.directory_begin));
  }
  // The file may have other bytes before the archive. Offsets in the archive do not count these
  // bytes.
  const std::uint64_t begin = trailer.begin - trailer.directory_nbytes;
  return {.begin = begin,
          .nbytes = trailer.directory_nbytes,
          .num_members = trailer.num_members,
          .base = begin - trailer.directory_begin};
}

void ZipReader::parse_directory(const Directory& directory, const ZipLimits& limits) {
  const std::uint64_t room = directory.nbytes / kCentralHeaderNbytes;
  if (directory.num_members > std::min(room, limits.max_members)) {
    fail(ErrorKind::corruption, "directory",
         "at most " + std::to_string(std::min(room, limits.max_members)) + " members",
         std::to_string(directory.num_members));
  }
  std::vector<std::byte> bytes(directory.nbytes);
  read_file_at(directory.begin, bytes);
  members_.reserve(directory.num_members);
  names_.reserve(directory.nbytes - directory.num_members * kCentralHeaderNbytes);

  std::span<const std::byte> rest = bytes;
  for (std::uint64_t i = 0; i < directory.num_members; ++i) {
    rest = rest.subspan(parse_member(rest, limits));
  }
  if (!rest.empty()) {
    fail(ErrorKind::corruption, "directory",
         "only " + std::to_string(directory.num_members) + " members",
         std::to_string(rest.size()) + " bytes after them");
  }
  names_.shrink_to_fit();
  std::size_t end = 0;
  for (Member& member : members_) {
    member.name = std::string_view(names_.data(), names_.size()).substr(end, member.name.size());
    end += member.name.size();
  }
  by_name_.resize(members_.size());
  std::iota(by_name_.begin(), by_name_.end(), std::uint32_t{0});
  const auto name_of = [this](std::uint32_t i) { return members_[i].name; };
  std::ranges::sort(by_name_, {}, name_of);
  const auto twice = std::ranges::adjacent_find(by_name_, {}, name_of);
  if (twice != by_name_.end()) {
    fail(ErrorKind::corruption, "member names", "each name once", describe(*twice) + " twice");
  }
  check_names_without_case();
}

/// Throws if two names differ only in the case of letters: torch reads one of the members for both.
void ZipReader::check_names_without_case() const {
  const auto has_capital = [](const Member& member) {
    return std::ranges::any_of(member.name, [](char c) { return c >= 'A' && c <= 'Z'; });
  };
  if (std::ranges::none_of(members_, has_capital)) return;
  std::vector<std::pair<std::string, std::size_t>> names;
  names.reserve(members_.size());
  for (std::size_t i = 0; i < members_.size(); ++i) {
    names.emplace_back(without_case(members_[i].name), i);
  }
  std::ranges::sort(names);
  const auto same =
      std::ranges::adjacent_find(names, {}, &std::pair<std::string, std::size_t>::first);
  if (same == names.end()) return;
  fail(ErrorKind::corruption, "member names", "each name once, whatever the case of its letters",
       describe(same->second) + " and " + describe(std::next(same)->second),
       "torch reads one of them for both");
}

std::size_t ZipReader::parse_member(std::span<const std::byte> rest, const ZipLimits& limits) {
  const std::size_t i = members_.size();
  if (rest.size() < kCentralHeaderNbytes || u32(rest, 0) != kCentralHeaderSignature) {
    fail(ErrorKind::corruption, "directory", "a header for member " + std::to_string(i), "none");
  }
  const std::uint16_t flags = u16(rest, 8);
  const std::size_t name_nbytes = u16(rest, 28);
  const std::size_t extra_nbytes = u16(rest, 30);
  const std::size_t comment_nbytes = u16(rest, 32);
  if (rest.size() - kCentralHeaderNbytes < name_nbytes + extra_nbytes + comment_nbytes) {
    fail(ErrorKind::corruption, "directory", "room for the name of member " + std::to_string(i),
         std::to_string(rest.size() - kCentralHeaderNbytes) + " bytes");
  }
  Member member;
  member.name = text(rest.subspan(kCentralHeaderNbytes, name_nbytes));
  if (name_nbytes > limits.max_name_nbytes || !is_contained_path(std::string(member.name))) {
    fail(ErrorKind::corruption, "member name",
         "a relative path without '..' of at most " + std::to_string(limits.max_name_nbytes) +
             " bytes",
         "'" + printable(member.name, 80) + "'", "a hostile archive?");
  }
  member.compression = compression_of(u16(rest, 10));
  member.crc32 = u32(rest, 16);
  member.stored_nbytes = u32(rest, 20);
  member.nbytes = u32(rest, 24);
  std::uint64_t first_disk = u16(rest, 34);
  member.extent.begin = u32(rest, 42);
  apply_zip64_fields(rest.subspan(kCentralHeaderNbytes + name_nbytes, extra_nbytes), member,
                     first_disk);

  names_.insert(names_.end(), member.name.begin(), member.name.end());
  members_.push_back(member);
  check_member(i, flags, first_disk);
  return kCentralHeaderNbytes + name_nbytes + extra_nbytes + comment_nbytes;
}

void ZipReader::check_member(std::size_t member, std::uint16_t flags,
                             std::uint64_t first_disk) const {
  if ((flags & kEncryptedFlags) != 0) {
    fail(ErrorKind::unsupported, describe(member), "unencrypted data", "encrypted data");
  }
  if (first_disk != 0)
    fail(ErrorKind::unsupported, "archive", "one disk", "an archive split over several disks");
  const Member& added = members_[member];
  if (added.compression == Compression::stored && added.nbytes != added.stored_nbytes) {
    fail(ErrorKind::corruption, describe(member) + " stored without compression",
         std::to_string(added.nbytes) + " bytes", std::to_string(added.stored_nbytes));
  }
}

// Computes the range of each member. Members follow each other up to the central directory; throws
// unless each has room for its header and its data.
void ZipReader::place_members(const Directory& directory) {
  std::vector<std::size_t> order(members_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
    return members_[a].extent.begin < members_[b].extent.begin;
  });
  std::uint64_t end = directory.begin;
  for (std::size_t k = order.size(); k-- > 0;) {
    Member& member = members_[order[k]];
    const auto begin = checked_add(member.extent.begin, directory.base);
    const std::uint64_t header_nbytes = kLocalHeaderNbytes + member.name.size();
    if (!begin || *begin > end || end - *begin < header_nbytes ||
        end - *begin - header_nbytes < member.stored_nbytes) {
      fail(ErrorKind::corruption, describe(order[k]),
           "room for " + std::to_string(member.stored_nbytes) + " bytes before " +
               (k + 1 < order.size() ? describe(order[k + 1]) : "the directory"),
           begin && *begin <= end ? std::to_string(end - *begin) : "an offset beyond it",
           "members that overlap?");
    }
    member.extent = {*begin, end};
    end = *begin;
  }
}

std::optional<std::size_t> ZipReader::find(std::string_view name) const {
  const auto name_of = [this](std::uint32_t i) { return members_[i].name; };
  const auto found = std::ranges::lower_bound(by_name_, name, {}, name_of);
  if (found == by_name_.end() || members_[*found].name != name) return std::nullopt;
  return *found;
}

ByteRange ZipReader::data_range(std::size_t index) const {
  const Member& member = members_[index];
  std::uint64_t data_begin = data_begin_[index].load(std::memory_order_relaxed);
  if (data_begin == 0) {
    std::vector<std::byte> header(kLocalHeaderNbytes + member.name.size());
    read_file_at(member.extent.begin, header);
    const auto contradicts = [&](std::string_view what) {
      fail(ErrorKind::corruption, describe(index),
           "the " + std::string(what) + " that the directory states",
           "another value in the local header");
    };
    if (u32(header, 0) != kLocalHeaderSignature) contradicts("signature");
    const std::uint16_t flags = u16(header, 6);
    if ((flags & kEncryptedFlags) != 0) contradicts("flags");
    if (compression_of(u16(header, 8)) != member.compression) contradicts("compression");
    const std::size_t name_nbytes = u16(header, 26);
    if (name_nbytes != member.name.size() ||
        text(std::span(header).subspan(kLocalHeaderNbytes)) != member.name) {
      contradicts("name");
    }
    if ((flags & kSizesFollowFlag) == 0) {
      const auto differs = [&](std::size_t offset, std::uint64_t stated) {
        const std::uint32_t found = u32(header, offset);
        return found != 0xffffffff && found != stated;
      };
      if (u32(header, 14) != member.crc32) contradicts("CRC");
      if (differs(18, member.stored_nbytes) || differs(22, member.nbytes)) contradicts("size");
    }
    data_begin = member.extent.begin + header.size() + u16(header, 28);
    if (data_begin > member.extent.end || member.extent.end - data_begin < member.stored_nbytes) {
      fail(ErrorKind::corruption, describe(index),
           "room for " + std::to_string(member.stored_nbytes) + " bytes before the next member",
           "a local header that leaves less");
    }
    data_begin_[index].store(data_begin, std::memory_order_relaxed);
  }
  return {data_begin, data_begin + member.stored_nbytes};
}

void ZipReader::require_stored(std::size_t index) const {
  if (members_[index].compression == Compression::stored) return;
  fail(ErrorKind::unsupported, describe(index), "uncompressed bytes", "compressed bytes",
       "torch never compresses; was it packed again?");
}

void ZipReader::read_at(std::size_t index, std::uint64_t offset, std::span<std::byte> out) const {
  require_stored(index);
  const ByteRange data = data_range(index);
  TESSERA_CHECK(offset <= data.nbytes() && out.size() <= data.nbytes() - offset);
  read_file_at(data.begin + offset, out);
}

std::vector<char> ZipReader::read_all(std::size_t index, std::uint64_t max_nbytes) const {
  const Member& member = members_[index];
  require_stored(index);
  if (member.nbytes > max_nbytes) {
    fail(ErrorKind::corruption, describe(index), "at most " + std::to_string(max_nbytes) + " bytes",
         std::to_string(member.nbytes));
  }
  std::vector<char> bytes(member.nbytes);
  read_at(index, 0, std::as_writable_bytes(std::span(bytes)));
  if (member.has_crc()) {
    const std::uint32_t found = tessera::crc32(0, std::as_bytes(std::span(bytes)));
    if (found != member.crc32) {
      throw Error::expected(ErrorKind::corruption,
                            {.path = path(), .byte_range = data_range(index)},
                            "CRC-32 of zip " + describe(index), crc_text(member.crc32),
                            crc_text(found), "damaged bytes?");
    }
  }
  return bytes;
}

namespace {

/// zlib's inflater for the raw streams that zip holds.
class Inflater {
 public:
  Inflater() { TESSERA_CHECK(inflateInit2(&stream_, -MAX_WBITS) == Z_OK); }
  ~Inflater() { inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  z_stream* operator->() { return &stream_; }
  int inflate_next() { return inflate(&stream_, Z_NO_FLUSH); }

 private:
  z_stream stream_{};
};

}  // namespace

std::uint32_t ZipReader::compute_crc(
    std::size_t index, const std::function<void(std::uint64_t nbytes)>& on_read) const {
  const Member& member = members_[index];
  if (member.compression == Compression::other) {
    fail(ErrorKind::unsupported, describe(index), "stored or deflated bytes",
         "another compression method");
  }
  const ByteRange data = data_range(index);
  std::vector<std::byte> block(std::min<std::uint64_t>(kBlockNbytes, data.nbytes()));
  std::uint32_t crc = 0;
  if (member.compression == Compression::stored) {
    for (std::uint64_t at = data.begin; at < data.end; at += block.size()) {
      const std::span<std::byte> bytes =
          std::span(block).first(std::min<std::uint64_t>(block.size(), data.end - at));
      read_file_at(at, bytes);
      crc = tessera::crc32(crc, bytes);
      on_read(bytes.size());
    }
    return crc;
  }

  const auto broken = [&](std::string_view found) {
    fail(ErrorKind::corruption, describe(index),
         "a deflated stream of " + std::to_string(member.nbytes) + " bytes", found);
  };
  Inflater inflater;
  std::vector<std::byte> inflated(std::min<std::uint64_t>(kBlockNbytes, member.nbytes + 1));
  std::uint64_t num_inflated = 0;
  int status = Z_OK;
  for (std::uint64_t at = data.begin; status != Z_STREAM_END;) {
    if (at == data.end) broken("a stream that is cut short");
    const std::span<std::byte> bytes =
        std::span(block).first(std::min<std::uint64_t>(block.size(), data.end - at));
    read_file_at(at, bytes);
    at += bytes.size();
    on_read(bytes.size());
    inflater->next_in = reinterpret_cast<Bytef*>(bytes.data());
    inflater->avail_in = static_cast<uInt>(bytes.size());
    do {
      inflater->next_out = reinterpret_cast<Bytef*>(inflated.data());
      inflater->avail_out = static_cast<uInt>(inflated.size());
      status = inflater.inflate_next();
      if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
        broken("a damaged stream");
      const std::size_t num_new = inflated.size() - inflater->avail_out;
      num_inflated += num_new;
      if (num_inflated > member.nbytes) broken("more bytes");
      crc = tessera::crc32(crc, std::span(inflated).first(num_new));
    } while (status == Z_OK && inflater->avail_out == 0);
  }
  if (num_inflated != member.nbytes) broken(std::to_string(num_inflated));
  return crc;
}

}  // namespace tessera::formats::zip
