#include "formats/native/file_header.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/digest.h"
#include "formats/native/byte_stream.h"
#include "formats/native/checksum_text.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

constexpr std::array<unsigned char, 8> kHdf5Magic = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1A, '\n'};
constexpr std::size_t kChecksumAt = kHeaderNbytes - 8;
constexpr std::size_t kHeaderReadNbytes = std::size_t{1} << 20;

bool starts_with(std::span<const std::byte> bytes, const std::array<unsigned char, 8>& magic) {
  return bytes.size() >= magic.size() && std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
}

std::string role_name(FileRole role) {
  return role == FileRole::index ? "the index" : "a rank file";
}

[[noreturn]] void fail_truncated(std::size_t nbytes_there, const std::string& path) {
  throw Error::expected(ErrorKind::corruption, {.path = path}, "file size",
                        "at least " + std::to_string(kHeaderNbytes) + " bytes",
                        std::to_string(nbytes_there) + " bytes", "truncated?");
}

/// Throws unless the file begins with the magic number. `there`: the bytes of the header, or the
/// whole file if it is shorter than a header.
void check_magic(std::span<const std::byte> there, const std::string& path) {
  if (starts_with(there, kMagic)) return;
  if (starts_with(there, kHdf5Magic)) {
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "format",
                          "a file of a native checkpoint", "another HDF5 file");
  }
  if (there.size() < kMagic.size()) fail_truncated(there.size(), path);
  throw Error::expected(ErrorKind::unsupported, {.path = path}, "format",
                        "a file of a native checkpoint",
                        "a file of another kind (its first bytes are not Tessera's)");
}

void check_version_and_checksum(std::uint32_t version,
                                std::span<const std::byte, kHeaderNbytes> bytes,
                                const std::string& path) {
  std::uint64_t stored_checksum = 0;
  std::memcpy(&stored_checksum, bytes.data() + kChecksumAt, sizeof stored_checksum);
  const std::uint64_t checksum = xxh3_64(bytes.first(kChecksumAt));
  // The version is judged only if the checksum is right: otherwise the version itself may be
  // damaged.
  if (checksum == stored_checksum && (version < kFirstVersion || version > kNewestVersion)) {
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "format version",
                          std::to_string(kFirstVersion) + " to " + std::to_string(kNewestVersion),
                          std::to_string(version), "written by a later release?");
  }
  if (checksum != stored_checksum) {
    throw Error::expected(
        ErrorKind::corruption, {.path = path, .fqn = {}, .byte_range = ByteRange{0, kHeaderNbytes}},
        "header checksum", checksum_text(stored_checksum), checksum_text(checksum), "damaged");
  }
}

FileRole get_role(ByteReader& reader) {
  const std::uint32_t role = reader.u32();
  if (role != static_cast<std::uint32_t>(FileRole::index) &&
      role != static_cast<std::uint32_t>(FileRole::rank)) {
    throw Error::expected(ErrorKind::corruption, {.path = reader.path()}, "role",
                          "1 (index) or 2 (rank file)", std::to_string(role));
  }
  return static_cast<FileRole>(role);
}

/// Reads the fields after the version.
FileHeader get_fields(ByteReader& reader, std::uint32_t version) {
  FileHeader header;
  header.version = version;
  header.role = get_role(reader);
  header.rank = reader.u32();
  header.world_size = reader.u32();
  header.checkpoint_id = reader.u64();
  header.index_range.begin = reader.u64();
  header.index_range.end = reader.u64();
  header.index_checksum = reader.u64();
  header.structure_checksum = reader.u64();
  header.file_nbytes = reader.u64();
  return header;
}

/// Checks the fields against each other and against the size of the file.
void validate_fields(const FileHeader& header, const ReadableFile& file) {
  const auto fail = [&](std::string_view rule, std::string_view expected, std::string_view found,
                        std::string_view likely_cause = {}) {
    throw Error::expected(ErrorKind::corruption, {.path = file.path()}, rule, expected, found,
                          likely_cause);
  };
  if (header.world_size < 1 || header.world_size > kMaxWorldSize) {
    fail("world size", "1 to " + std::to_string(kMaxWorldSize), std::to_string(header.world_size));
  }
  if (header.rank >= header.world_size) {
    fail("rank", "less than " + std::to_string(header.world_size), std::to_string(header.rank));
  }
  if (header.file_nbytes != file.nbytes()) {
    fail("file size", std::to_string(header.file_nbytes) + " bytes",
         std::to_string(file.nbytes()) + " bytes",
         file.nbytes() < header.file_nbytes ? "truncated?" : "appended to?");
  }
  const ByteRange index = header.index_range;
  if (index.begin < kHeaderNbytes || index.end < index.begin || index.end > header.file_nbytes) {
    fail("index range",
         "within [" + std::to_string(kHeaderNbytes) + ", " + std::to_string(header.file_nbytes) +
             ")",
         "[" + std::to_string(index.begin) + ", " + std::to_string(index.end) + ")");
  }
  if (index.nbytes() > kMaxIndexNbytes) refuse_index_size(file.path(), index.nbytes());
}

}  // namespace

void refuse_index_size(const std::string& path, std::uint64_t nbytes) {
  throw Error::expected(ErrorKind::unsupported, {.path = path}, "index size",
                        "at most " + std::to_string(kMaxIndexNbytes) + " bytes",
                        std::to_string(nbytes) + " bytes");
}

std::string rank_file_name(std::int64_t rank) {
  char name[40];
  std::snprintf(name, sizeof name, "rank-%05lld.h5", static_cast<long long>(rank));
  return name;
}

std::string linked_file_name(std::uint64_t checkpoint_id, std::int64_t rank) {
  char name[60];
  std::snprintf(name, sizeof name, "base-%016llx-%05lld.h5",
                static_cast<unsigned long long>(checkpoint_id), static_cast<long long>(rank));
  return name;
}

std::array<std::byte, kHeaderNbytes> encode_header(const FileHeader& header) {
  ByteWriter fields;
  for (const unsigned char byte : kMagic) fields.u8(byte);
  fields.u32(header.version);
  fields.u32(static_cast<std::uint32_t>(header.role));
  fields.u32(header.rank);
  fields.u32(header.world_size);
  fields.u64(header.checkpoint_id);
  fields.u64(header.index_range.begin);
  fields.u64(header.index_range.end);
  fields.u64(header.index_checksum);
  fields.u64(header.structure_checksum);
  fields.u64(header.file_nbytes);
  TESSERA_CHECK(fields.bytes().size() == kHeaderFieldsNbytes);

  std::array<std::byte, kHeaderNbytes> bytes{};
  std::ranges::copy(fields.bytes(), bytes.begin());
  const std::uint64_t checksum = xxh3_64(std::span(bytes).first(kChecksumAt));
  std::memcpy(bytes.data() + kChecksumAt, &checksum, sizeof checksum);
  return bytes;
}

FileHeader read_header(const ReadableFile& file) {
  const std::string& path = file.path();
  std::array<std::byte, kHeaderNbytes> bytes{};
  const std::size_t nbytes_there =
      static_cast<std::size_t>(std::min<std::uint64_t>(file.nbytes(), kHeaderNbytes));
  file.read_at(0, std::span(bytes).first(nbytes_there));
  const auto there = std::span<const std::byte>(bytes).first(nbytes_there);
  check_magic(there, path);
  if (nbytes_there < kHeaderNbytes) fail_truncated(nbytes_there, path);

  ByteReader reader(there, path, 0);
  reader.u64();  // the magic
  const std::uint32_t version = reader.u32();
  check_version_and_checksum(version, bytes, path);
  const FileHeader header = get_fields(reader, version);
  validate_fields(header, file);
  return header;
}

void require_index_role(const FileHeader& header, const std::string& path) {
  if (header.role != FileRole::index) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "role", role_name(FileRole::index),
                          role_name(header.role), "renamed?");
  }
}

void require_rank_role(const FileHeader& header, const std::string& path, std::int64_t rank,
                       std::int64_t world_size) {
  if (header.role != FileRole::rank) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "role", role_name(FileRole::rank),
                          role_name(header.role), "renamed?");
  }
  if (header.rank != rank) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "rank", std::to_string(rank),
                          std::to_string(header.rank), "renamed?");
  }
  if (header.world_size != world_size) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "world size",
                          std::to_string(world_size), std::to_string(header.world_size),
                          "from another checkpoint?");
  }
}

std::vector<std::byte> read_index_bytes(const ReadableFile& file, const FileHeader& header) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(header.index_range.nbytes()));
  file.read_at(header.index_range.begin, bytes);
  const std::uint64_t checksum = xxh3_64(bytes);
  if (checksum != header.index_checksum) {
    throw Error::expected(
        ErrorKind::corruption, {.path = file.path(), .fqn = {}, .byte_range = header.index_range},
        "index checksum", checksum_text(header.index_checksum), checksum_text(checksum), "damaged");
  }
  return bytes;
}

std::uint64_t structure_checksum(const ReadableFile& file, std::span<const ByteRange> data_ranges) {
  Xxh3 checksum;
  std::vector<std::byte> buffer;
  const auto add = [&](ByteRange range) {
    while (!range.empty()) {
      const auto nbytes =
          static_cast<std::size_t>(std::min<std::uint64_t>(range.nbytes(), kHeaderReadNbytes));
      if (buffer.size() < nbytes) buffer.resize(nbytes);
      const auto block = std::span(buffer).first(nbytes);
      file.read_at(range.begin, block);
      checksum.update(block);
      range.begin += nbytes;
    }
  };
  std::uint64_t position = kHeaderNbytes;
  for (const ByteRange& data : data_ranges) {
    TESSERA_CHECK(data.begin >= position && data.end >= data.begin && data.end <= file.nbytes());
    add({position, data.begin});
    position = data.end;
  }
  add({position, file.nbytes()});
  return checksum.digest();
}

}  // namespace tessera::formats::native
