#include "object_store/spooled_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstddef>
#include <latch>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/temporary_directory.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {
namespace {

constexpr std::uint64_t kPart = std::uint64_t{1} << 20;

std::vector<int> indices(const std::vector<SpooledFile::Work>& work) {
  std::vector<int> found;
  for (const auto& part : work) found.push_back(part.index);
  return found;
}

class SpooledFileTest : public testing::Test {
 protected:
  SpooledFile make(SpooledFile::Release release = SpooledFile::Release::after_sync) {
    FileSystem::posix().create(path_)->close();
    return {path_, "s3://bucket/file", kPart, release};
  }
  static std::vector<SpooledFile::Work> write(SpooledFile& file, std::uint64_t offset,
                                              std::uint64_t nbytes, char fill = 'x') {
    const std::string text(nbytes, fill);
    return file.write_at(offset, std::as_bytes(std::span(text)));
  }
  static void upload(SpooledFile& file, const std::vector<SpooledFile::Work>& work) {
    for (const auto& part : work) {
      file.note_uploaded(part, {.number = part.index + 1, .nbytes = part.range.nbytes()});
    }
  }
  std::uint64_t nbytes_on_disk() const {
    struct stat status {};
    EXPECT_EQ(::stat(path_.c_str(), &status), 0);
    return static_cast<std::uint64_t>(status.st_blocks) * 512;
  }

  test::TemporaryDirectory directory_;
  const std::string path_ = directory_ / "file";
};

TEST(PartSizesTest, AtMostTenThousandPartsOfWholeMebibytes) {
  constexpr std::uint64_t kMib = std::uint64_t{1} << 20;
  EXPECT_EQ(PartSizes::of_file(0), 8 * kMib);
  EXPECT_EQ(PartSizes::of_file(80'000 * kMib), 8 * kMib);
  EXPECT_EQ(PartSizes::of_file(80'000 * kMib + 1), 9 * kMib);
  for (const std::uint64_t nbytes : {std::uint64_t{5} << 40, (std::uint64_t{3} << 40) + 12345}) {
    const std::uint64_t part = PartSizes::of_file(nbytes);
    EXPECT_EQ(part % kMib, 0U);
    EXPECT_LE((nbytes + part - 1) / part, PartSizes::kMaxParts);
  }
}

TEST(WrittenRangesTest, RangesMergeWhereTheyMeet) {
  WrittenRanges ranges;
  EXPECT_TRUE(ranges.covers({7, 7}));
  ranges.add({10, 20});
  ranges.add({30, 40});
  EXPECT_TRUE(ranges.covers({12, 20}));
  EXPECT_FALSE(ranges.covers({12, 31}));
  ranges.add({20, 30});
  EXPECT_TRUE(ranges.covers({10, 40}));
  EXPECT_FALSE(ranges.covers({9, 11}));
  ranges.add({0, 100});
  EXPECT_TRUE(ranges.covers({0, 100}));
}

TEST_F(SpooledFileTest, PartsAreTakenOnceWholeAndTheFirstAtTheEnd) {
  SpooledFile file = make();
  file.resize(4 * kPart + 100);
  EXPECT_EQ(indices(write(file, 0, kPart)), std::vector<int>());  // part 0 waits for rest()
  EXPECT_EQ(indices(write(file, 2 * kPart, kPart / 2)), std::vector<int>());
  EXPECT_EQ(indices(write(file, 2 * kPart + kPart / 2, kPart)), std::vector<int>{2});
  EXPECT_EQ(indices(write(file, kPart, kPart)), std::vector<int>{1});
  EXPECT_EQ(indices(file.sync()), (std::vector<int>{3, 4}));  // never written: zeros
  const auto rest = file.rest();
  EXPECT_EQ(indices(rest), std::vector<int>{0});
  EXPECT_EQ(rest.front().range, (ByteRange{0, kPart}));
  EXPECT_FALSE(file.is_one_part());
}

TEST_F(SpooledFileTest, APartThatIsWrittenAgainIsTakenAgain) {
  SpooledFile file = make();
  file.resize(3 * kPart);
  const auto first = write(file, kPart, kPart);
  ASSERT_EQ(indices(first), std::vector<int>{1});
  EXPECT_TRUE(write(file, kPart + 5, 10, 'y').empty());  // waits for sync()
  upload(file, first);                                   // the old bytes
  const auto again = file.sync();
  ASSERT_EQ(indices(again), (std::vector<int>{1, 2}));
  EXPECT_EQ(file.read(again.front().range)[5], std::byte{'y'});
  upload(file, again);
  upload(file, file.rest());
  EXPECT_EQ(file.uploaded_parts().size(), 3U);
}

/// A part may become complete while another thread still writes a range of it again, as HDF5 does
/// with its metadata.
TEST_F(SpooledFileTest, APartIsTakenAgainIfItWasTakenDuringAWrite) {
  constexpr std::uint64_t kAgainNbytes = kPart - 1;
  const std::string again(kAgainNbytes, 'b');
  for (int round = 0; round < 300; ++round) {
    SpooledFile file = make();
    file.resize(3 * kPart);
    upload(file, write(file, kPart, kPart));
    write(file, 2 * kPart, kPart - 1, 'a');
    const auto upload_last_byte_of_again = [&](const std::vector<SpooledFile::Work>& work) {
      for (const auto& part : work) {
        const std::uint64_t end = part.range.begin + kAgainNbytes;
        const auto byte = std::to_integer<std::uint32_t>(file.read({end - 1, end}).front());
        file.note_uploaded(part, {.number = part.index + 1, .crc32 = byte});
      }
    };
    std::latch start(2);
    std::thread other([&] {
      start.arrive_and_wait();
      upload_last_byte_of_again(file.write_at(2 * kPart, std::as_bytes(std::span(again))));
    });
    start.arrive_and_wait();
    upload_last_byte_of_again(write(file, 3 * kPart - 1, 1));
    other.join();
    upload_last_byte_of_again(file.sync());
    upload_last_byte_of_again(file.rest());
    ASSERT_EQ(file.uploaded_parts().back().crc32, std::uint32_t{'b'}) << "round " << round;
    FileSystem::posix().remove_all(path_);
  }
}

TEST_F(SpooledFileTest, APartIsTakenAgainOnlyAfterItsUpload) {
  SpooledFile file = make();
  file.resize(3 * kPart);
  const auto first = write(file, kPart, kPart);
  ASSERT_EQ(indices(first), std::vector<int>{1});
  write(file, kPart + 5, 10, 'y');
  const auto others = file.sync();
  EXPECT_EQ(indices(others), std::vector<int>{2});
  upload(file, first);
  upload(file, others);
  const auto rest = file.rest();
  EXPECT_EQ(indices(rest), (std::vector<int>{0, 1}));
  upload(file, rest);
  EXPECT_EQ(file.uploaded_parts().size(), 3U);
}

TEST_F(SpooledFileTest, UploadedPartsLeaveTheDiskAtOnceIfBytesAreWrittenOnce) {
  SpooledFile file = make(SpooledFile::Release::after_upload);
  file.resize(64 * kPart);
  EXPECT_LT(nbytes_on_disk(), kPart);
  for (std::uint64_t part = 0; part < 64; ++part) {
    upload(file, write(file, part * kPart, kPart));
    EXPECT_LT(nbytes_on_disk(), 3 * kPart);
  }
  EXPECT_TRUE(file.sync().empty());
  EXPECT_EQ(file.nbytes(), 64 * kPart);
}

TEST_F(SpooledFileTest, OtherUploadedPartsLeaveTheDiskAfterTheSync) {
  SpooledFile file = make();
  file.resize(8 * kPart);
  for (std::uint64_t part = 0; part < 8; ++part) upload(file, write(file, part * kPart, kPart));
  EXPECT_GE(nbytes_on_disk(), 8 * kPart);
  file.sync();
  EXPECT_LT(nbytes_on_disk(), 3 * kPart);
}

TEST_F(SpooledFileTest, AFileThatGrowsGetsMoreParts) {
  SpooledFile file = make();
  std::vector<SpooledFile::Work> work;
  for (std::uint64_t part = 0; part < 6; ++part) {
    for (const auto& taken : write(file, part * kPart, kPart)) work.push_back(taken);
  }
  EXPECT_EQ(indices(work), (std::vector<int>{1, 2, 3, 4, 5}));
  upload(file, work);
  file.resize(5 * kPart + 10);
  EXPECT_EQ(indices(file.sync()), std::vector<int>{5});  // resize() made it shorter
}

}  // namespace
}  // namespace tessera::object_store
