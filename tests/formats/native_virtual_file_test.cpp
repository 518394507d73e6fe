#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "formats/native/h5_encoding.h"
#include "formats/native/h5_virtual_file.h"
#include "support/temporary_directory.h"

// What VirtualFile writes, read by the HDF5 library.
namespace tessera::formats::native::h5 {
namespace {

using namespace tessera::test;

constexpr std::uint64_t kUserBlockNbytes = 4096;

Handle open(const std::string& path) {
  return {H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose};
}

Handle open_dataset(const Handle& file, const std::string& name) {
  return {H5Dopen2(file.id(), name.c_str(), H5P_DEFAULT), H5Dclose};
}

TEST(NativeVirtualFileTest, ChecksumsAreThoseOfLookup3) {
  EXPECT_EQ(lookup3(""), 0xDEADBEEFu);
  EXPECT_EQ(lookup3("Four score and seven years ago"), 0x17770551u);
}

TEST(NativeVirtualFileTest, TheLibraryFindsEachOfManyNames) {
  const TemporaryDirectory folder;
  const std::string path = folder / "many.h5";
  constexpr int kNumNames = 20'000;  // more than one level of the tree holds
  {
    VirtualFile file(FileSystem::posix(), path, kUserBlockNbytes);
    std::deque<std::string> names;
    std::vector<VirtualFile::Link> links;
    for (int i = 0; i < kNumNames; ++i) {
      const std::array<std::int64_t, 1> shape{i};
      links.push_back({names.emplace_back("w" + std::to_string(i)),
                       file.add_virtual_dataset(DType::float32, shape, {}, {}, 1)});
    }
    file.close(std::move(links));
  }
  const Handle file = open(path);
  ASSERT_TRUE(file);
  H5G_info_t info{};
  ASSERT_GE(H5Gget_info(file.id(), &info), 0);
  EXPECT_EQ(info.nlinks, kNumNames);
  for (int i = 0; i < kNumNames; i += 7) {
    const Handle dataset = open_dataset(file, "w" + std::to_string(i));
    ASSERT_TRUE(dataset) << i;
    const Handle space{H5Dget_space(dataset.id()), H5Sclose};
    ASSERT_EQ(H5Sget_simple_extent_npoints(space.id()), i);
  }
}

TEST(NativeVirtualFileTest, SelectionsReachBeyondFourBillionElements) {
  const TemporaryDirectory folder;
  const std::string path = folder / "large.h5";
  constexpr std::int64_t kRows = std::int64_t{5} << 32;
  const std::array<std::int64_t, 2> shape{kRows, 3};
  const std::vector<VirtualMapping> mappings{{.box = Box{{0, 0}, {7, 3}},
                                              .source_file = "a.h5",
                                              .source_dataset = "x%",
                                              .source_numel = 21},
                                             {.box = Box{{kRows - 2, 1}, {2, 1}},
                                              .source_file = "a.h5",
                                              .source_dataset = "y",
                                              .source_numel = 3 * kRows,
                                              .source_begin = 3 * kRows - 2}};
  {
    VirtualFile file(FileSystem::posix(), path, kUserBlockNbytes);
    const std::uint64_t address = file.add_virtual_dataset(DType::uint8, shape, mappings, {}, 2);
    file.close({{"w", address}, {"tied", address}});
  }
  const Handle file = open(path);
  const Handle dataset = open_dataset(file, "tied");
  ASSERT_TRUE(dataset);
  const Handle properties{H5Dget_create_plist(dataset.id()), H5Pclose};
  std::size_t num_mappings = 0;
  ASSERT_GE(H5Pget_virtual_count(properties.id(), &num_mappings), 0);
  ASSERT_EQ(num_mappings, 2u);
  std::array<char, 10> name{};
  ASSERT_GE(H5Pget_virtual_dsetname(properties.id(), 0, name.data(), name.size()), 0);
  EXPECT_STREQ(name.data(), "x%%");
  const Handle space{H5Pget_virtual_vspace(properties.id(), 1), H5Sclose};
  std::array<hsize_t, 2> begin{};
  std::array<hsize_t, 2> last{};
  ASSERT_GE(H5Sget_select_bounds(space.id(), begin.data(), last.data()), 0);
  EXPECT_EQ(begin, (std::array<hsize_t, 2>{kRows - 2, 1}));
  EXPECT_EQ(last, (std::array<hsize_t, 2>{kRows - 1, 1}));
  const Handle source{H5Pget_virtual_srcspace(properties.id(), 1), H5Sclose};
  ASSERT_GE(H5Sget_select_bounds(source.id(), begin.data(), last.data()), 0);
  EXPECT_EQ(begin[0], static_cast<hsize_t>(3 * kRows - 2));
  EXPECT_EQ(last[0], static_cast<hsize_t>(3 * kRows - 1));
}

TEST(NativeVirtualFileTest, ObjectsLargerThanAPartOfTheHeapAreThere) {
  const TemporaryDirectory folder;
  const std::string path = folder / "large.h5";
  constexpr std::int64_t kNumMappings = 1000;
  const std::array<std::int64_t, 1> shape{kNumMappings};
  std::vector<VirtualMapping> mappings;
  for (std::int64_t i = 0; i < kNumMappings; ++i) {
    mappings.push_back({.box = Box{{i}, {1}},
                        .source_file = "a.h5",
                        .source_dataset = "d" + std::to_string(i),
                        .source_numel = 1});
  }
  {
    VirtualFile file(FileSystem::posix(), path, kUserBlockNbytes);
    std::vector<VirtualFile::Link> links;
    for (const auto& [name, other] : {std::pair{"a", "a1"}, {"b", "b1"}, {"c", "c1"}}) {
      links.push_back({name, file.add_virtual_dataset(DType::int64, shape, mappings, {}, 1)});
      links.push_back(
          {other, file.add_virtual_dataset(DType::int64, shape, {mappings.data(), 1}, {}, 1)});
    }
    file.close(std::move(links));
  }
  const Handle file = open(path);
  for (const auto& [name, num] : {std::pair{"b", std::size_t{1000}}, {"c1", std::size_t{1}}}) {
    const Handle dataset = open_dataset(file, name);
    ASSERT_TRUE(dataset);
    const Handle properties{H5Dget_create_plist(dataset.id()), H5Pclose};
    std::size_t num_mappings = 0;
    ASSERT_GE(H5Pget_virtual_count(properties.id(), &num_mappings), 0);
    EXPECT_EQ(num_mappings, num);
  }
}

}  // namespace
}  // namespace tessera::formats::native::h5
