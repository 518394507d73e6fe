#include "formats/zip/zip_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace tessera::formats::zip {
namespace {

template <class Unsigned>
Unsigned field(const std::string& bytes, std::size_t offset) {
  Unsigned value{};
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

TEST(ZipLayoutTest, DataIsAlignedAndHeadersFillTheRest) {
  ZipLayout layout;
  for (const std::uint64_t nbytes : {0u, 1u, 63u, 64u, 65u, 1000u}) {
    layout.add_member("archive/data/" + std::to_string(nbytes), nbytes);
  }
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < layout.num_members(); ++i) {
    EXPECT_EQ(layout.header_range(i).begin, end);
    EXPECT_EQ(layout.data_range(i).begin, layout.header_range(i).end);
    EXPECT_EQ(layout.data_range(i).begin % 64, 0u);
    EXPECT_EQ(layout.local_header(i, 7).size(), layout.header_range(i).nbytes());
    end = layout.data_range(i).end;
  }
  EXPECT_EQ(layout.directory_begin(), end);
}

TEST(ZipLayoutTest, SmallArchiveHasNoZip64Fields) {
  ZipLayout layout;
  layout.add_member("a", 5);
  const std::string header = layout.local_header(0, 0x12345678);
  EXPECT_EQ(field<std::uint32_t>(header, 0), 0x04034b50u);
  EXPECT_EQ(field<std::uint16_t>(header, 8), 0);  // stored
  EXPECT_EQ(field<std::uint32_t>(header, 14), 0x12345678u);
  EXPECT_EQ(field<std::uint32_t>(header, 18), 5u);
  EXPECT_EQ(field<std::uint32_t>(header, 22), 5u);
  const std::uint32_t crc = 0x12345678;
  const std::string directory = layout.directory({&crc, 1});
  EXPECT_EQ(directory.size(), 46u + 1 + 22);
  EXPECT_EQ(field<std::uint32_t>(directory, 47), 0x06054b50u);
  EXPECT_EQ(field<std::uint32_t>(directory, 47 + 16), layout.directory_begin());
}

TEST(ZipLayoutTest, LargeMemberCarriesItsSizesInZip64Fields) {
  ZipLayout layout;
  constexpr std::uint64_t kLarge = std::uint64_t{5} << 30;
  layout.add_member("large", kLarge);
  layout.add_member("after", 3);
  const std::string header = layout.local_header(0, 1);
  EXPECT_EQ(header.size(), layout.header_range(0).nbytes());
  EXPECT_EQ(field<std::uint32_t>(header, 18), 0xffffffffu);
  EXPECT_EQ(field<std::uint16_t>(header, 35), 0x0001);
  EXPECT_EQ(field<std::uint64_t>(header, 39), kLarge);
  EXPECT_EQ(field<std::uint64_t>(header, 47), kLarge);

  const std::vector<std::uint32_t> crcs{1, 2};
  const std::string directory = layout.directory(crcs);
  // The second entry: its sizes fit, its offset does not.
  const std::size_t second = 46 + 5 + 4 + 16;
  EXPECT_EQ(field<std::uint32_t>(directory, second), 0x02014b50u);
  EXPECT_EQ(field<std::uint32_t>(directory, second + 24), 3u);
  EXPECT_EQ(field<std::uint32_t>(directory, second + 42), 0xffffffffu);
  EXPECT_EQ(field<std::uint64_t>(directory, second + 46 + 5 + 4), layout.header_range(1).begin);
  const std::size_t zip64_end = second + 46 + 5 + 4 + 8;
  EXPECT_EQ(field<std::uint32_t>(directory, zip64_end), 0x06064b50u);
  EXPECT_EQ(field<std::uint64_t>(directory, zip64_end + 32), 2u);
  EXPECT_EQ(field<std::uint64_t>(directory, zip64_end + 48), layout.directory_begin());
  EXPECT_EQ(field<std::uint32_t>(directory, zip64_end + 56), 0x07064b50u);
  EXPECT_EQ(field<std::uint64_t>(directory, zip64_end + 64), layout.directory_begin() + zip64_end);
}

TEST(ZipLayoutTest, ManyMembersAreCountedInZip64Fields) {
  ZipLayout layout;
  for (int i = 0; i < 70000; ++i) layout.add_member(std::to_string(i), 0);
  const std::string directory = layout.directory(std::vector<std::uint32_t>(70000));
  const std::size_t end = directory.size() - 22;
  EXPECT_EQ(field<std::uint16_t>(directory, end + 10), 0xffff);
  EXPECT_EQ(field<std::uint64_t>(directory, end - 20 - 56 + 32), 70000u);
}

}  // namespace
}  // namespace tessera::formats::zip
