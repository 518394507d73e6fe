#include "formats/open_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

using test::ThrowsError;

std::size_t num_open_files() {
  std::size_t number = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    if (entry.exists()) ++number;
  }
  return number;
}

std::byte first_byte(const ReadableFile& file) {
  std::byte byte{};
  file.read_at(0, {&byte, 1});
  return byte;
}

class OpenFilesTest : public testing::Test {
 protected:
  std::string write(int number, const std::string& text) {
    std::string path = tmp_ / std::to_string(number);
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory tmp_;
};

TEST_F(OpenFilesTest, NoMoreStayOpenThanTheProcessMaySpare) {
  const std::size_t before = num_open_files();
  std::vector<std::unique_ptr<ReadableFile>> files;
  const int count = 2 * static_cast<int>(num_files_kept_open());
  for (int i = 0; i < count; ++i) {
    files.push_back(open_kept(fs_, write(i, std::string(1, static_cast<char>(i % 251)))));
  }
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < count; ++i) {
      EXPECT_EQ(first_byte(*files[static_cast<std::size_t>(i)]), static_cast<std::byte>(i % 251));
    }
    EXPECT_LE(num_open_files(), before + num_files_kept_open());
  }
  files.clear();
  EXPECT_EQ(num_open_files(), before);
}

TEST_F(OpenFilesTest, AFileThatWasReplacedMeanwhileIsRefused) {
  const auto file = open_kept(fs_, write(-1, "ab"));
  EXPECT_EQ(first_byte(*file), std::byte{'a'});
  std::vector<std::unique_ptr<ReadableFile>> others;
  for (int i = 0; i < static_cast<int>(num_files_kept_open()); ++i) {
    others.push_back(open_kept(fs_, write(i, "x")));
  }
  fs_.remove_all(file->path());
  write(-1, "abc");
  EXPECT_THAT(
      [&] { first_byte(*file); },
      ThrowsError(ErrorKind::corruption, "expected 2 bytes, as when it was opened, found 3 bytes"));
}

TEST_F(OpenFilesTest, AFileThatWasReplacedByOneOfTheSameSizeIsRefused) {
  const auto file = open_kept(fs_, write(-1, "ab"));
  const auto time = std::filesystem::last_write_time(file->path());
  std::vector<std::unique_ptr<ReadableFile>> others;
  for (int i = 0; i < static_cast<int>(num_files_kept_open()); ++i) {
    others.push_back(open_kept(fs_, write(i, "x")));
  }
  fs_.remove_all(file->path());
  write(-1, "cd");
  std::filesystem::last_write_time(file->path(), time + std::chrono::seconds(1));
  EXPECT_THAT([&] { first_byte(*file); },
              ThrowsError(ErrorKind::mismatch, "file: expected the file that was opened: 2 bytes"));
}

TEST_F(OpenFilesTest, AFileThatWasOverwrittenInPlaceIsRefused) {
  const auto file = open_kept(fs_, write(-1, "ab"));
  const auto time = std::filesystem::last_write_time(file->path());
  EXPECT_EQ(first_byte(*file), std::byte{'a'});
  write(-1, "cd");
  std::filesystem::last_write_time(file->path(), time + std::chrono::seconds(1));
  EXPECT_THAT([&] { first_byte(*file); },
              ThrowsError(ErrorKind::mismatch, "expected the file as it was when it was opened"));
}

}  // namespace
}  // namespace tessera::formats
