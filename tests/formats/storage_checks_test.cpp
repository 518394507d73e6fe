#include "formats/torch_zip/storage_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "support/error_matchers.h"

namespace tessera::formats::torch_zip {
namespace {

using test::ThrowsError;

/// One storage in memory, with its CRC.
class MemoryStorage final : public Storages {
 public:
  explicit MemoryStorage(std::size_t nbytes) : bytes_(nbytes) {
    for (std::size_t i = 0; i < nbytes; ++i) bytes_[i] = static_cast<std::byte>(i * i >> 5);
    crc_ = tessera::crc32(0, bytes_);
  }
  void damage(std::size_t at) { bytes_[at] ^= std::byte{1}; }
  std::uint64_t num_read() const { return num_read_; }
  std::span<const std::byte> bytes(std::size_t begin, std::size_t end) const {
    return std::span(bytes_).subspan(begin, end - begin);
  }

  std::optional<std::size_t> find(std::string_view /*key*/) const override { return 0; }
  std::string name_of(std::string_view /*key*/) const override { return "data/0"; }
  std::string name(std::size_t /*storage*/) const override { return "data/0"; }
  std::uint64_t nbytes(std::size_t /*storage*/) const override { return bytes_.size(); }
  std::uint64_t plain_nbytes() const override { return bytes_.size(); }
  std::optional<std::uint32_t> crc32(std::size_t /*storage*/) const override { return crc_; }
  ByteRange data_range(std::size_t /*storage*/) const override { return {0, bytes_.size()}; }
  void read_at(std::size_t /*storage*/, std::uint64_t offset,
               std::span<std::byte> out) const override {
    num_read_ += out.size();
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

 private:
  std::vector<std::byte> bytes_;
  std::uint32_t crc_ = 0;
  mutable std::uint64_t num_read_ = 0;
};

class StorageChecksTest : public testing::Test {
 protected:
  void read(std::size_t begin, std::size_t end) {
    checks_.add(storage_, "model.pt", 0, begin, storage_.bytes(begin, end));
  }
  void check_rest(double most_rest) {
    checks_.check_rest(storage_, "model.pt", {.most_rest = most_rest});
  }

  MemoryStorage storage_{100'000};
  StorageChecks checks_;
};

TEST_F(StorageChecksTest, ReadsThatOverlapCheckTheStorageWhenAllIsRead) {
  storage_.damage(50'000);
  read(0, 60'000);
  read(30'000, 90'000);
  read(95'000, 100'000);
  EXPECT_TRUE(checks_.has_rest());
  EXPECT_THAT(
      [&] { read(10, 99'000); },
      ThrowsError(ErrorKind::corruption, "model.pt: bytes [0, 100000): CRC-32 of 'data/0'"));
}

TEST_F(StorageChecksTest, TheRestIsReadIfItIsSmallEnough) {
  read(20'000, 40'000);
  read(20'000, 30'000);
  check_rest(2.5);  // the rest has 80,000 bytes, and 30,000 were read
  EXPECT_EQ(storage_.num_read(), 0U);
  check_rest(2.7);
  EXPECT_EQ(storage_.num_read(), 80'000U);
  EXPECT_FALSE(checks_.has_rest());
}

TEST_F(StorageChecksTest, DamageInTheRestIsFound) {
  storage_.damage(99'999);
  read(0, 99'000);
  EXPECT_THAT([&] { check_rest(1); }, ThrowsError(ErrorKind::corruption, "CRC-32 of 'data/0'"));
}

TEST_F(StorageChecksTest, DamageIsFoundAfterMoreReadsThanRangesAreKept) {
  storage_.damage(77'777);
  for (std::size_t at = 0; at < 100'000; at += 10) read(at, at + 5);
  EXPECT_TRUE(checks_.has_rest());
  EXPECT_THAT([&] { check_rest(2); }, ThrowsError(ErrorKind::corruption, "CRC-32 of 'data/0'"));
}

TEST_F(StorageChecksTest, ThreadsThatReadTheSameBytesCheckThemOnce) {
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (std::size_t i = 0; i < 100; ++i) {
        const std::size_t begin = (i * 37 + t * 11) % 100 * 1000;
        read(begin, std::min<std::size_t>(begin + 1500, 100'000));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(checks_.has_rest());  // and the CRC was right
}

TEST(ChecksOfFilesTest, AFileThatIsOpenedAgainContinuesItsChecks) {
  MemoryStorage storage(1000);
  storage.damage(3);
  ChecksOfFiles files;
  const auto read = [&](std::size_t begin, std::size_t end) {
    const auto checks = files.of(7);
    checks->add(storage, "model.pt", 0, begin, storage.bytes(begin, end));
    files.keep(7, checks);
  };
  read(0, 600);
  EXPECT_THAT(files.files_to_check(0.1), testing::IsEmpty());
  EXPECT_THAT(files.files_to_check(1), testing::ElementsAre(7));
  EXPECT_THAT([&] { read(600, 1000); }, ThrowsError(ErrorKind::corruption, "CRC-32 of 'data/0'"));
}

TEST(ChecksOfFilesTest, PartsOfSeveralReadsAreUnited) {
  MemoryStorage storage(1000);
  ChecksOfFiles files;
  const auto read = [&](std::size_t begin, std::size_t end) {
    const auto checks = files.of(7);
    checks->add(storage, "model.pt", 0, begin, storage.bytes(begin, end));
    files.keep(7, checks);
  };
  read(700, 900);  // one part
  read(100, 300);  // two parts
  read(300, 700);  // one part again
  EXPECT_THAT(files.files_to_check(0.3), testing::ElementsAre(7));
  read(0, 100);
  EXPECT_THAT(files.files_to_check(1), testing::ElementsAre(7));
  read(900, 1000);  // and the CRC is right
  EXPECT_THAT(files.files_to_check(1), testing::IsEmpty());
}

}  // namespace
}  // namespace tessera::formats::torch_zip
