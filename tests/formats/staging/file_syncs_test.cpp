#include "formats/staging/file_syncs.h"

#include <gmock/gmock.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

constexpr int kNumFiles = 200;
static_assert(kNumFiles > 2 * FileSyncs::kNumSyncedByCaller);

void sync_files(FileSystem& fs, const std::string& folder, int num_files) {
  FileSyncs syncs;
  for (int i = 0; i < num_files; ++i) {
    syncs.add(fs.create(folder + "/" + std::to_string(i)));
  }
  syncs.wait();
}

/// Returns how often each operation is in a transcript.
std::map<std::string, int> counts(const std::string& transcript) {
  std::map<std::string, int> counts;
  std::istringstream lines(transcript);
  for (std::string line; std::getline(lines, line);) ++counts[line.substr(0, line.find(' '))];
  return counts;
}

TEST(FileSyncsTest, EachFileIsSyncedAndThenClosed) {
  const test::TemporaryDirectory tmp;
  test::FaultFileSystem fs(FileSystem::posix(), tmp.path());
  sync_files(fs, tmp.path(), kNumFiles);
  const std::string transcript = fs.transcript();
  EXPECT_THAT(counts(transcript), testing::ElementsAre(testing::Pair("close", kNumFiles),
                                                       testing::Pair("create", kNumFiles),
                                                       testing::Pair("sync", kNumFiles)));
  for (int i = 0; i < kNumFiles; ++i) {
    const std::string name = " " + std::to_string(i) + "\n";
    EXPECT_LT(transcript.find("sync" + name), transcript.find("close" + name)) << name;
  }
}

TEST(FileSyncsTest, FewFilesAreSyncedWhereTheyAreAdded) {
  const test::TemporaryDirectory tmp;
  test::FaultFileSystem fs(FileSystem::posix(), tmp.path());
  FileSyncs syncs;
  for (int i = 0; i < 2; ++i) syncs.add(fs.create(tmp / std::to_string(i)));
  EXPECT_EQ(fs.transcript(), "create 0\nsync 0\nclose 0\ncreate 1\nsync 1\nclose 1\n");
}

// Shows E4.
TEST(FileSyncsTest, AFailureOfAnyOperationSurfaces) {
  for (int failing = 0; failing < 3 * kNumFiles; failing += 7) {
    SCOPED_TRACE(failing);
    const test::TemporaryDirectory tmp;
    test::FaultFileSystem fs(FileSystem::posix(), tmp.path());
    fs.fail_operation(failing);
    EXPECT_THROW(sync_files(fs, tmp.path(), kNumFiles), Error);
    EXPECT_TRUE(fs.has_failed());
  }
}

/// A file of which only `sync` does something: it throws if the file is `broken`.
class NoFile final : public WritableFile {
 public:
  explicit NoFile(std::string path) : path_(std::move(path)) {}
  const std::string& path() const override { return path_; }
  void write_at(std::uint64_t /*offset*/, std::span<const std::byte> /*bytes*/) override {}
  void resize(std::uint64_t /*nbytes*/) override {}
  void sync() override {
    if (path_ == "broken") throw Error(ErrorKind::io, {.path = path_}, "no sync");
  }
  void close() override {}

 private:
  const std::string path_;
};

// Shows E4.
TEST(FileSyncsTest, AFailureOfAThreadSurfacesFromALaterAdd) {
  FileSyncs syncs;
  for (std::size_t i = 0; i < FileSyncs::kNumSyncedByCaller; ++i) {
    syncs.add(std::make_unique<NoFile>("sound"));
  }
  EXPECT_NO_THROW(syncs.add(std::make_unique<NoFile>("broken")));
  // How many files are added before a thread has failed depends on the scheduler.
  constexpr int kMaxLaterFiles = 1'000'000;
  const auto add_later_files = [&] {
    for (int i = 0; i < kMaxLaterFiles; ++i) syncs.add(std::make_unique<NoFile>("sound"));
  };
  EXPECT_THAT(add_later_files, test::ThrowsError(ErrorKind::io, "broken"));
  EXPECT_THROW(syncs.wait(), Error);
}

TEST(FileSyncsTest, ItMayEndWithoutAWait) {
  const test::TemporaryDirectory tmp;
  {
    FileSyncs syncs;
    for (int i = 0; i < kNumFiles; ++i) {
      syncs.add(FileSystem::posix().create(tmp / std::to_string(i)));
    }
  }
  for (int i = 0; i < kNumFiles; ++i) {
    EXPECT_TRUE(std::filesystem::exists(tmp / std::to_string(i))) << i;
  }
}

TEST(FileSyncsTest, EachDirectoryIsSynced) {
  const test::TemporaryDirectory tmp;
  test::FaultFileSystem fs(FileSystem::posix(), tmp.path());
  std::vector<std::string> paths;
  for (int i = 0; i < kNumFiles; ++i) paths.push_back(tmp / std::to_string(i));
  sync_directories(fs, paths);
  EXPECT_EQ(counts(fs.transcript())["sync_directory"], kNumFiles);
  fs.fail_operation(kNumFiles / 2);
  EXPECT_THROW(sync_directories(fs, paths), Error);
}

}  // namespace
}  // namespace tessera::formats
