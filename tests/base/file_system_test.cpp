#include "tessera/base/file_system.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/named_object.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/files.h"
#include "support/temporary_directory.h"

namespace tessera {
namespace {

using test::FaultFileSystem;
using test::read_all;
using test::TemporaryDirectory;
using test::ThrowsError;
using test::write_file;

std::span<const std::byte> as_bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

class FileSystemTest : public ::testing::Test {
 protected:
  FileSystem& fs_ = FileSystem::posix();
  TemporaryDirectory tmp_;
};

TEST_F(FileSystemTest, BytesWrittenAtOffsetsAreReadBack) {
  const auto file = fs_.create(tmp_ / "a");
  file->resize(10);
  file->write_at(7, as_bytes_of("xyz"));
  file->write_at(0, as_bytes_of("abc"));
  file->sync();
  file->close();
  EXPECT_EQ(read_all(tmp_ / "a"), std::string("abc\0\0\0\0xyz", 10));
  fs_.open_for_update(tmp_ / "a")->write_at(3, as_bytes_of("defg"));
  EXPECT_EQ(read_all(tmp_ / "a"), "abcdefgxyz");
}

TEST_F(FileSystemTest, BytesWrittenPastThePageCacheAreTheSame) {
  // Large and small ranges; their offsets in the file and in memory are aligned or not.
  std::string expected(9'000'000, '\0');
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<char>(i * i >> 7);
  const auto file = fs_.create(tmp_ / "a");
  file->resize(expected.size());
  file->bypass_cache();
  const std::vector<std::size_t> ends = {4096,      4096 + 300'000, 700'416,   700'416 + 5'000'000,
                                         6'000'000, 6'000'640,      8'192'000, expected.size()};
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    file->write_at(begin, as_bytes_of(expected).subspan(begin, end - begin));
    begin = end;
  }
  file->sync();
  file->close();
  EXPECT_TRUE(read_file(fs_, tmp_ / "a", expected.size()) == expected);
}

TEST_F(FileSystemTest, ResizeInMemoryReservesNothingButNoticesThatMemoryIsFull) {
  const std::string path = "/dev/shm/tessera-test-" + std::to_string(::getpid());  // tmpfs
  const auto file = fs_.create(path);
  file->resize(1 << 20);
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  EXPECT_THAT([&] { file->resize(std::uint64_t{1} << 50); },
              ThrowsError(ErrorKind::io, "reserve 1125899906842624 bytes: No space left"));
  std::filesystem::remove(path);
}

TEST_F(FileSystemTest, ReadingPastTheEndNamesPathAndRange) {
  write_file(tmp_ / "a", "12345");
  const auto file = fs_.open(tmp_ / "a");
  std::string out(4, '\0');
  const auto target = std::as_writable_bytes(std::span(out));
  file->read_at(1, target);
  EXPECT_EQ(out, "2345");
  EXPECT_THAT([&] { file->read_at(2, target); },
              ThrowsError(ErrorKind::corruption,
                          "a: bytes [2, 6): file size: expected at least 6 "
                          "bytes, found 5 bytes"));
  EXPECT_THAT([&] { file->read_at(~std::uint64_t{0} - 1, target); },
              ThrowsError(ErrorKind::corruption, "file size"));
  EXPECT_NO_THROW(file->read_at(5, {}));
}

TEST_F(FileSystemTest, AFileThatShrinksWhileOpenIsCorruptionAndNoHang) {
  write_file(tmp_ / "a", "12345678");
  const auto file = fs_.open(tmp_ / "a");
  std::filesystem::resize_file(tmp_ / "a", 3);
  std::string out(8, '\0');
  EXPECT_THAT([&] { file->read_at(0, std::as_writable_bytes(std::span(out))); },
              ThrowsError(ErrorKind::corruption, "found 3 bytes"));
}

TEST_F(FileSystemTest, OnlyRegularFilesOpen) {
  ASSERT_EQ(::mkfifo((tmp_ / "fifo").c_str(), 0600), 0);
  EXPECT_THAT([&] { fs_.open(tmp_ / "fifo"); }, ThrowsError(ErrorKind::not_found, "regular file"));
  EXPECT_THAT([&] { fs_.open(tmp_.path()); }, ThrowsError(ErrorKind::not_found, "a directory"));
  EXPECT_THAT([&] { fs_.open("/dev/zero"); }, ThrowsError(ErrorKind::not_found, "a device"));
  EXPECT_THAT([&] { fs_.open(tmp_ / "none"); }, ThrowsError(ErrorKind::not_found, "none: open"));
  EXPECT_EQ(fs_.kind_of(tmp_ / "fifo"), FileKind::other);
  EXPECT_EQ(fs_.kind_of(tmp_.path()), FileKind::directory);
  EXPECT_EQ(fs_.kind_of(tmp_ / "none"), std::nullopt);
  EXPECT_EQ(fs_.kind_of(tmp_ / "fifo/below"), std::nullopt);
}

TEST_F(FileSystemTest, NothingIsOverwrittenByCreateRenameOrMakeDirectory) {
  write_file(tmp_ / "a", "a");
  write_file(tmp_ / "b", "b");
  EXPECT_THAT([&] { fs_.create(tmp_ / "a"); }, ThrowsError(ErrorKind::already_exists, "a: create"));
  EXPECT_THAT([&] { fs_.make_directory(tmp_ / "a"); }, ThrowsError(ErrorKind::already_exists, "a"));
  EXPECT_THAT([&] { fs_.rename(tmp_ / "a", tmp_ / "b"); },
              ThrowsError(ErrorKind::already_exists, "b: rename"));
  EXPECT_EQ(read_all(tmp_ / "b"), "b");
}

TEST_F(FileSystemTest, ExchangeSwapsFilesAndDirectories) {
  write_file(tmp_ / "a", "file");
  fs_.make_directory(tmp_ / "b");
  write_file(tmp_ / "b/inside", "x");
  fs_.exchange(tmp_ / "a", tmp_ / "b");
  EXPECT_EQ(read_all(tmp_ / "b"), "file");
  EXPECT_EQ(fs_.list_directory(tmp_ / "a"), std::vector<std::string>{"inside"});
}

TEST_F(FileSystemTest, RemoveAllDoesNotFollowLinks) {
  write_file(tmp_ / "kept", "x");
  fs_.make_directory(tmp_ / "d");
  std::filesystem::create_symlink(tmp_ / "kept", tmp_ / "d/link");
  fs_.remove_all(tmp_ / "d");
  fs_.remove_all(tmp_ / "d");
  EXPECT_EQ(fs_.list_directory(tmp_.path()), std::vector<std::string>{"kept"});
}

TEST_F(FileSystemTest, LinksMayNotLeaveTheDirectory) {
  fs_.make_directory(tmp_ / "d");
  fs_.make_directory(tmp_ / "d2");
  write_file(tmp_ / "d/inside", "x");
  write_file(tmp_ / "d2/outside", "x");
  std::filesystem::create_symlink("inside", tmp_ / "d/stays");
  std::filesystem::create_symlink("../d2/outside", tmp_ / "d/leaves");
  std::filesystem::create_symlink(tmp_ / "d2", tmp_ / "d/leaves_too");
  std::filesystem::create_symlink("d", tmp_ / "link_to_d");
  for (const std::string directory : {"d", "link_to_d", "d/"}) {
    EXPECT_NO_THROW(require_contained(fs_, tmp_ / directory, "inside"));
    EXPECT_NO_THROW(require_contained(fs_, tmp_ / directory, "stays"));
    for (const std::string name : {"leaves", "leaves_too/outside"}) {
      EXPECT_THAT([&] { require_contained(fs_, tmp_ / directory, name); },
                  ThrowsError(ErrorKind::corruption, "link: expected a target inside"));
    }
  }
}

TEST_F(FileSystemTest, ReadFileRefusesWhatIsTooLarge) {
  write_file(tmp_ / "a", "12345");
  EXPECT_EQ(read_file(fs_, tmp_ / "a", 5), "12345");
  EXPECT_THAT([&] { read_file(fs_, tmp_ / "a", 4); },
              ThrowsError(ErrorKind::corruption, "expected at most 4 bytes, found 5 bytes"));
}

TEST(PathTest, ContainedPathsStayBelowTheirDirectory) {
  for (const std::string name : {"a", "a/b", "..a", "a..", "a/...", "./a", "a//b"}) {
    EXPECT_TRUE(is_contained_path(name)) << name;
  }
  for (const std::string& name :
       {std::string(""), std::string("/a"), std::string(".."), std::string("../a"),
        std::string("a/.."), std::string("a/../b"), std::string("a\0b", 3)}) {
    EXPECT_FALSE(is_contained_path(name)) << name;
  }
  EXPECT_EQ(join_path("d", "f"), "d/f");
  EXPECT_EQ(join_path("d/", "f"), "d/f");
}

TEST(PathTest, WhatAPathEndsInAndWhereItLies) {
  struct Split {
    std::string path, directory, last;
  };
  for (const auto& [path, directory, last] :
       {Split{"a", ".", "a"}, Split{"a/", ".", "a"}, Split{"/a", "/", "a"}, Split{"/a//", "/", "a"},
        Split{"d/a", "d", "a"}, Split{"/d/e/a/", "/d/e", "a"}, Split{"/", "/", ""},
        Split{"", ".", ""}}) {
    EXPECT_EQ(directory_of(path), directory) << path;
    EXPECT_EQ(last_component(path), last) << path;
  }
}

TEST(NamedObjectTest, AFailureIsNotTheSameAsNothing) {
  const test::TemporaryDirectory tmp;
  ASSERT_EQ(::symlink("loop", (tmp / "loop").c_str()), 0);
  EXPECT_TRUE(detail::mode_of_name(tmp / "loop"));
  EXPECT_FALSE(detail::mode_of_name(tmp / "none"));
  EXPECT_FALSE(detail::inode_of_name(tmp / "none/below"));
  EXPECT_FALSE(detail::mode_of_name(tmp / std::string(300, 'n')));
  EXPECT_THAT([&] { detail::mode_of_name(tmp / "loop/below"); },
              test::ThrowsError(ErrorKind::io, "loop/below: stat: "));
  EXPECT_THAT([&] { detail::inode_of_name(tmp / "loop/below"); },
              test::ThrowsError(ErrorKind::io, "loop/below: stat: "));
}

}  // namespace
}  // namespace tessera
