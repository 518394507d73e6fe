#include "formats/zip/zip_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "support/error_matchers.h"
#include "support/memory_file.h"
#include "support/zip_bytes.h"

// Shows E2, E3. The container of torch.save, read from hostile bytes.
namespace tessera::formats::zip {
namespace {

using test::MemoryFile;
using test::ThrowsError;
using test::zip_bytes;
using test::ZipMember;

const std::vector<ZipMember> kMembers = {{.name = "a/data.pkl", .data = "pickle"},
                                         {.name = "a/data/0", .data = std::string(100, 'x')}};

std::string read_member(const ZipReader& zip, std::string_view name) {
  const std::vector<char> bytes = zip.read_all(zip.find(name).value(), 1 << 20);
  return {bytes.begin(), bytes.end()};
}

void open(const std::string& bytes) {
  const MemoryFile file(bytes);
  ZipReader(file, {0, bytes.size()});
}

// Opens an archive and reads every member in every way.
void read_everything(const std::string& bytes) {
  const MemoryFile file(bytes);
  const ZipReader zip(file, {0, bytes.size()});
  for (std::size_t i = 0; i < zip.members().size(); ++i) {
    zip.compute_crc(i, [](std::uint64_t) {});
    zip.read_all(i, 1 << 20);
  }
}

TEST(ZipReaderTest, ReadsMembersInEveryLayout) {
  for (const bool zip64 : {false, true}) {
    for (const std::size_t comment_nbytes : {0u, 7u, 65535u}) {
      for (const std::size_t prefix_nbytes : {0u, 1u, 5000u}) {
        for (const std::size_t data_nbytes : {0u, 1u, 100000u}) {
          SCOPED_TRACE(testing::Message() << zip64 << " " << comment_nbytes << " " << prefix_nbytes
                                          << " " << data_nbytes);
          const std::string data(data_nbytes, 'd');
          const std::string bytes =
              std::string(prefix_nbytes, 'p') +
              zip_bytes({{.name = "a/data.pkl", .data = "pickle"},
                         {.name = "a/data/0", .data = data, .local_extra = "FB\2\0ZZ"},
                         {.name = "a/data/1", .data = data, .flags = 0x0808}},
                        {.zip64 = zip64, .comment = std::string(comment_nbytes, 'c')});
          const MemoryFile file(bytes);
          const ZipReader zip(file, {0, bytes.size()});
          ASSERT_EQ(zip.members().size(), 3u);
          EXPECT_EQ(read_member(zip, "a/data.pkl"), "pickle");
          EXPECT_EQ(read_member(zip, "a/data/0"), data);
          EXPECT_EQ(read_member(zip, "a/data/1"), data);
          EXPECT_EQ(zip.find("a/data"), std::nullopt);
        }
      }
    }
  }
}

// A .distcp file: archives one after the other.
TEST(ZipReaderTest, ReadsAWindowOfAFile) {
  std::string bytes;
  std::vector<ByteRange> windows;
  for (int i = 0; i < 5; ++i) {
    const std::string archive = zip_bytes({{.name = "a/data/0", .data = std::to_string(i)}});
    windows.push_back({bytes.size(), bytes.size() + archive.size()});
    bytes += archive;
  }
  const MemoryFile file(bytes);
  for (int i = 0; i < 5; ++i) {
    const std::uint64_t reads_before = file.num_reads();
    const ZipReader zip(file, windows[static_cast<std::size_t>(i)]);
    EXPECT_EQ(read_member(zip, "a/data/0"), std::to_string(i));
    EXPECT_EQ(file.num_reads() - reads_before, 1u) << "a small archive takes one read";
  }
  EXPECT_THAT(
      [&] {
        ZipReader(file, {0, bytes.size() + 1});
      },
      ThrowsError(ErrorKind::corruption, "cut short"));
}

TEST(ZipReaderTest, LargeArchivesAreNotReadWhole) {
  const std::string bytes = zip_bytes({{.name = "a/data/0", .data = std::string(10 << 20, 'x')}});
  const MemoryFile file(bytes);
  const ZipReader zip(file, {0, bytes.size()});
  EXPECT_LT(file.num_bytes_read(), 20000u);
  std::vector<std::byte> read(100);
  zip.read_at(0, (10 << 20) - 100, read);
  EXPECT_EQ(read.back(), std::byte{'x'});
  EXPECT_LT(file.num_bytes_read(), 20000u);
}

TEST(ZipReaderTest, RangesOfMembersAreTheirOwn) {
  std::string data;
  for (int i = 0; i < 1000; ++i) data += static_cast<char>(i * 7);
  const std::string bytes = zip_bytes({{.name = "x", .data = "1"}, {.name = "y", .data = data}});
  const MemoryFile file(bytes);
  const ZipReader zip(file, {0, bytes.size()});
  const ByteRange range = zip.data_range(1);
  EXPECT_EQ(bytes.substr(range.begin, range.nbytes()), data);
  std::vector<std::byte> read(3);
  zip.read_at(1, 500, read);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(read.data()), 3), data.substr(500, 3));
}

TEST(ZipReaderTest, ChecksTheCrc) {
  std::vector<ZipMember> members = kMembers;
  members[1].crc = 0x12345678;
  const std::string bytes = zip_bytes(members);
  const MemoryFile file(bytes);
  const ZipReader zip(file, {0, bytes.size()});
  EXPECT_THAT([&] { zip.read_all(1, 1000); }, ThrowsError(ErrorKind::corruption, "12345678"));
  EXPECT_NO_THROW(zip.read_all(0, 1000));

  members[1].crc = 0;  // as torch.serialization.set_crc32_options(False) leaves it
  const MemoryFile without_crc(zip_bytes(members));
  const ZipReader unchecked(without_crc, {0, without_crc.nbytes()});
  EXPECT_FALSE(unchecked.members()[1].has_crc());
  EXPECT_TRUE(unchecked.members()[0].has_crc());
  EXPECT_NO_THROW(unchecked.read_all(1, 1000));
}

TEST(ZipReaderTest, RefusesBrokenArchives) {
  const auto with = [](auto change) {
    std::vector<ZipMember> members = kMembers;
    change(members);
    return zip_bytes(members);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "an empty file"},
      {"PK", "not a zip archive?"},
      {std::string(100000, 'x'), "not a zip archive?"},
      {with([](auto& m) { m[1].name = "../evil"; }), "without '..'"},
      {with([](auto& m) { m[1].name = "a/../../evil"; }), "without '..'"},
      {with([](auto& m) { m[1].name = "/etc/passwd"; }), "without '..'"},
      {with([](auto& m) { m[1].name = ""; }), "without '..'"},
      {with([](auto& m) { m[1].name = std::string("a\0b", 3); }), "without '..'"},
      {with([](auto& m) { m[1].name = std::string(2000, 'n'); }), "at most 1024 bytes"},
      {with([](auto& m) { m[1].name = m[0].name; }), "each name once"},
      {with([](auto& m) { m[0].name = "z/data/0", m[1].name = "z/Data/0"; }),
       "member 'z/data/0' and member 'z/Data/0' (torch reads one of them for both)"},
      {with([](auto& m) { m[1].flags = 1; }), "found encrypted data"},
      {with([](auto& m) { m[1].header_offset = 0; }), "overlap"},
      {with([](auto& m) { m[1].header_offset = 0xfffffff0; }), "an offset beyond it"},
      {with([](auto& m) { m[1].nbytes = m[1].stored_nbytes = 0xfffffff0; }), "room for 4294967280"},
      {with([](auto& m) { m[0].nbytes = m[0].stored_nbytes = 7; }),
       "room for 7 bytes before member"},
      {with([](auto& m) { m[1].nbytes = 200; }),
       "without compression: expected 200 bytes, found 100"},
      {zip_bytes(kMembers, {.num_members = 3}), "at most 2 members"},
      {zip_bytes(kMembers, {.num_members = 1}), "bytes after them"},
      {zip_bytes(kMembers, {.num_members = 65535}), "members"},
      {zip_bytes(kMembers, {.directory_nbytes = 0xffffff}), "directory: expected to end"},
      {zip_bytes(kMembers, {.directory_begin = 0xffffff}), "directory: expected to end"},
      {zip_bytes(kMembers, {.directory_nbytes = 10}), "members"},
      {zip_bytes(kMembers, {.disk = 1}), "one disk"},
      {zip_bytes(kMembers, {.zip64 = true, .num_members = std::uint64_t{1} << 60}), "members"},
      {zip_bytes(kMembers, {.zip64 = true, .directory_nbytes = ~std::uint64_t{0}}), "directory"},
      {zip_bytes(kMembers, {.zip64 = true, .directory_begin = ~std::uint64_t{0} - 50}),
       "directory"},
      {zip_bytes(kMembers, {.zip64 = true, .disk = 1}), "one disk"},
  };
  for (const auto& [bytes, what] : cases) {
    SCOPED_TRACE(what);
    EXPECT_THAT([&] { open(bytes); }, testing::Throws<Error>(testing::Property(
                                          "what", &Error::what, testing::HasSubstr(what))));
  }
}

TEST(ZipReaderTest, RefusesLocalHeadersThatContradict) {
  const auto with = [](auto change) {
    std::vector<ZipMember> members = kMembers;
    change(members[1]);
    return zip_bytes(members);
  };
  std::string other_signature = zip_bytes(kMembers);
  other_signature[other_signature.find("PK\3\4", 4)] = 'Q';
  std::string other_method = zip_bytes(kMembers);
  other_method[other_method.find("PK\3\4", 4) + 8] = 8;
  std::string other_crc = zip_bytes(kMembers);
  other_crc[other_crc.find("PK\3\4", 4) + 14] ^= 1;
  std::string other_size = zip_bytes(kMembers);
  other_size[other_size.find("PK\3\4", 4) + 22] ^= 1;
  std::string long_extra = zip_bytes(kMembers);
  long_extra[long_extra.find("PK\3\4", 4) + 28] = 1;
  const std::pair<std::string, std::string> cases[] = {
      {other_signature, "signature"},
      {other_method, "compression"},
      {other_crc, "CRC"},
      {other_size, "size"},
      {long_extra, "leaves less"},
      {with([](ZipMember& m) { m.local_name = "a/data/1"; }), "name"},
      {with([](ZipMember& m) { m.local_name = "a/data/00"; }), "name"},
  };
  for (const auto& [bytes, what] : cases) {
    SCOPED_TRACE(what);
    EXPECT_NO_THROW(open(bytes));
    EXPECT_THAT([&] { read_everything(bytes); }, ThrowsError(ErrorKind::corruption, what));
  }
}

std::string deflated(const std::string& data) {
  std::string packed(compressBound(data.size()) + 64, '\0');
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  stream.avail_in = static_cast<uInt>(data.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::uint32_t crc_of(const std::string& data) {
  return static_cast<std::uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(data.data()), static_cast<uInt>(data.size())));
}

TEST(ZipReaderTest, CompressedMembersAreCheckedButNeverRead) {
  const std::string data(3 << 20, 'z');
  ZipMember member{.name = "code/x.py",
                   .data = deflated(data),
                   .method = 8,
                   .crc = crc_of(data),
                   .nbytes = data.size()};
  const auto check = [](const ZipMember& m) {
    const MemoryFile file(zip_bytes({m}));
    const ZipReader zip(file, {0, file.nbytes()});
    EXPECT_THAT([&] { zip.read_all(0, 1 << 30); },
                ThrowsError(ErrorKind::unsupported, "'code/x.py': expected uncompressed bytes"));
    return zip.compute_crc(0, [](std::uint64_t) {});
  };
  EXPECT_EQ(check(member), crc_of(data));

  ZipMember bomb = member;
  bomb.nbytes = 1000;  // claims less than it inflates to
  EXPECT_THAT([&] { check(bomb); }, ThrowsError(ErrorKind::corruption, "found more"));
  ZipMember short_one = member;
  short_one.nbytes = data.size() + 1;
  EXPECT_THAT([&] { check(short_one); }, ThrowsError(ErrorKind::corruption, "3145729"));
  ZipMember damaged = member;
  damaged.data[5] = static_cast<char>(~damaged.data[5]);
  EXPECT_THAT([&] { check(damaged); }, testing::Throws<Error>());
  ZipMember cut = member;
  cut.data.resize(cut.data.size() / 2);
  EXPECT_THAT([&] { check(cut); },
              ThrowsError(ErrorKind::corruption, "a stream that is cut short"));
  ZipMember other = member;
  other.method = 12;
  EXPECT_THAT([&] { check(other); }, ThrowsError(ErrorKind::unsupported, "another compression"));
}

TEST(ZipReaderTest, EveryTruncationIsRefused) {
  const std::string whole = zip_bytes(kMembers);
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    SCOPED_TRACE(nbytes);
    EXPECT_THAT([&] { open(whole.substr(0, nbytes)); }, testing::Throws<Error>());
  }
}

TEST(ZipReaderTest, DamagedBytesNeverCrash) {
  const std::string wholes[] = {zip_bytes(kMembers), zip_bytes(kMembers, {.zip64 = true})};
  std::mt19937 random(5);
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = wholes[round % 2];
    for (int k = 0; k < 1 + round % 4; ++k) {
      damaged[random() % damaged.size()] = static_cast<char>(random() % 3 == 0 ? 0xff : random());
    }
    try {
      read_everything(damaged);
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace tessera::formats::zip
