#include "tessera/formats/checkpoint_series.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "formats/dcp.h"
#include "formats/native_checkpoint.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {
namespace {

using namespace tessera::test;
using test::kSampleStep;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// A directory in which checkpoints are written, damaged and looked for.
class CheckpointSeriesTest : public ::testing::Test {
 protected:
  void write(const std::string& name) { write_native(small_checkpoint(), directory_ / name); }
  void write_dcp(const std::string& name) {
    MemoryCheckpoint source("dcp", 2);
    source.add({"w", DType::float32, {4}}, bytes_of<float>({1, 2, 3, 4}),
               {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
    const auto writer = create_dcp(fs_, directory_ / name, source.contents(), {});
    copy_checkpoint(source, *writer);
  }
  void write_safetensors(const std::string& name) {
    MemoryCheckpoint source("safetensors");
    source.add({"w", DType::float32, {4}}, bytes_of<float>({1, 2, 3, 4}));
    source.add_value("epoch", Value(1));
    const auto writer = create_safetensors(fs_, directory_ / name, source.contents(), {Value(1)});
    copy_checkpoint(source, *writer);
  }
  void truncate(const std::string& name) {
    const std::string path = directory_ / name;
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  }
  LatestValid latest(Validation validation = Validation::structure) {
    return latest_valid(fs_, directory_.path(), validation);
  }
  std::string latest_name() {
    const std::string path = latest().path;
    return path.empty() ? path : path.substr(directory_.path().size() + 1);
  }
  std::vector<std::string> names() { return fs_.list_directory(directory_.path()); }
  std::vector<std::string> removed_names(int num_kept) {
    std::vector<std::string> removed;
    for (const std::string& path : keep_last(fs_, directory_.path(), num_kept)) {
      removed.push_back(path.substr(directory_.path().size() + 1));
    }
    return removed;
  }

  FileSystem& fs_ = FileSystem::posix();
  TemporaryDirectory directory_;
};

TEST_F(CheckpointSeriesTest, DigitsCompareAsNumbersAndTimeStampsDoNotMatter) {
  for (const char* name :
       {"step-1000", "step-999", "step-0008", "step-8", "step-08b", "step-9", "step-10b"})
    write(name);
  const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1000);
  std::filesystem::last_write_time(directory_ / "step-1000", long_ago);
  std::vector<std::string> newest_first;
  while (!latest().path.empty()) {
    newest_first.push_back(latest_name());
    fs_.remove_all(latest().path);
  }
  EXPECT_THAT(newest_first, ElementsAre("step-1000", "step-999", "step-10b", "step-9", "step-08b",
                                        "step-8", "step-0008"));
}

TEST_F(CheckpointSeriesTest, NothingThereIsNoError) {
  EXPECT_EQ(latest_valid(fs_, directory_ / "none").path, "");
  EXPECT_EQ(latest().path, "");
  write_file(directory_ / "train.log", "loss 1.0");
  std::filesystem::create_directory(directory_ / "events");
  std::filesystem::create_symlink("nowhere", directory_ / "broken");
  write(".snapshot");
  EXPECT_EQ(latest().path, "");
  EXPECT_THAT(latest().skipped, IsEmpty());
}

// Shows E4.
TEST_F(CheckpointSeriesTest, TornOnesAreSkippedAndTold) {
  write("step-1");
  write("step-2");
  fs_.remove_all(directory_ / "step-2/rank-00002.h5");  // of a rank that holds nothing
  write("step-3");
  truncate("step-3/rank-00001.h5");
  write("step-4");
  fs_.remove_all(directory_ / "step-4/index.h5");
  write("step-5");
  truncate("step-5/index.h5");
  write("step-6");
  write_native(MemoryCheckpoint("another", 3), directory_ / "another");
  std::filesystem::copy_file(directory_ / "another/rank-00000.h5",
                             directory_ / "step-6/rank-00000.h5",
                             std::filesystem::copy_options::overwrite_existing);
  std::filesystem::create_directory(directory_ / "step-7.partial");
  write_file(directory_ / "step-7.partial.journal", "");
  std::filesystem::create_directory(directory_ / "step-8.removing");
  const LatestValid found = latest();
  EXPECT_EQ(found.path, directory_ / "step-1");
  std::vector<std::string> skipped;
  for (const SkippedCheckpoint& one : found.skipped) {
    skipped.push_back(one.path.substr(directory_.path().size() + 1) + " | " + one.why);
  }
  EXPECT_THAT(skipped, ElementsAre(HasSubstr("step-8.removing | an unfinished removal"),
                                   HasSubstr("step-7.partial | an unfinished save"),
                                   HasSubstr("step-6/rank-00000.h5: structure"),
                                   HasSubstr("step-5/index.h5"), HasSubstr("found only rank files"),
                                   HasSubstr("step-3/rank-00001.h5: structure"),
                                   HasSubstr("step-2/rank-00002.h5: structure")));
}

// Shows E4.
TEST_F(CheckpointSeriesTest, DamagedBytesAreFoundWhereChecksumsAreAskedFor) {
  write("step-1");
  write("step-2");
  const std::string path = directory_ / "step-2/rank-00001.h5";
  std::string bytes = read_all(path);
  const auto at = bytes.find(std::string("\0\0\x40\x41", 4));  // 12.0, an element of that rank
  ASSERT_NE(at, std::string::npos);
  bytes[at] = '\1';
  write_file(path, bytes);
  EXPECT_EQ(latest_name(), "step-2");
  const LatestValid found = latest(Validation::checksums);
  EXPECT_EQ(found.path, directory_ / "step-1");
  ASSERT_THAT(found.skipped, SizeIs(1));
  EXPECT_THAT(found.skipped[0].why, HasSubstr("checksum: expected"));
}

TEST_F(CheckpointSeriesTest, EveryFormatIsLookedInto) {
  write_safetensors("step-1.safetensors");
  write_dcp("step-2");
  write_dcp("step-3");
  truncate("step-3/__1_0.distcp");
  write_dcp("step-4");
  fs_.remove_all(directory_ / "step-4/__0_0.distcp");
  EXPECT_EQ(latest_name(), "step-2");
  EXPECT_THAT(latest().skipped, SizeIs(2));
  fs_.remove_all(directory_ / "step-2");
  EXPECT_EQ(latest_name(), "step-1.safetensors");
  EXPECT_EQ(latest(Validation::checksums).path, directory_ / "step-1.safetensors");
  fs_.remove_all(directory_ / "step-1.safetensors.values.json");
  EXPECT_EQ(latest_name(), "");
}

TEST_F(CheckpointSeriesTest, KeepLastCountsValidOnesAndLeavesWhatIsForeign) {
  for (const int step : {1, 2, 3, 4, 5, 6}) write("step-" + std::to_string(step));
  truncate("step-2/rank-00000.h5");
  truncate("step-5/rank-00000.h5");
  fs_.remove_all(directory_ / "step-1/index.h5");  // which can be rebuilt
  std::filesystem::create_directory(directory_ / "events");
  std::filesystem::create_directory(directory_ / "step-0.partial");
  std::filesystem::create_directory_symlink("step-3", directory_ / "best");
  write("archive");
  std::filesystem::create_directory(directory_ / "archive/old");
  write_file(directory_ / "a.zip", "PK\x03\x04 but no more");
  write_file(directory_ / "notes", "a line {");
  EXPECT_THAT(removed_names(2), ElementsAre("step-3", "step-2"));
  EXPECT_THAT(names(), ElementsAre("a.zip", "archive", "best", "events", "notes", "step-0.partial",
                                   "step-1", "step-4", "step-5", "step-6"));
  EXPECT_THAT(removed_names(2), IsEmpty());
  EXPECT_THAT([&] { removed_names(0); }, ThrowsError(ErrorKind::invalid_argument, "found 0"));
}

TEST_F(CheckpointSeriesTest, KeepLastLeavesFoldersWithFilesOfOthers) {
  for (const char* name : {"step-1", "step-2", "step-3", "step-4", "step-5"}) write(name);
  write_file(directory_ / "step-1/notes.txt", "the best one");
  write_safetensors("model.safetensors");
  std::filesystem::copy_file(directory_ / "model.safetensors",
                             directory_ / "step-2/model.safetensors");
  std::filesystem::create_symlink("index.h5", directory_ / "step-3/link");
  EXPECT_THAT(keep_last(fs_, directory_.path(), 1, "step-5"), ElementsAre(directory_ / "step-4"));
  EXPECT_EQ(fs_.list_directory(directory_ / "step-1").size(), 5U);
  EXPECT_TRUE(fs_.kind_of(directory_ / "step-2/model.safetensors"));
  EXPECT_TRUE(fs_.kind_of(directory_ / "step-3/index.h5"));
}

TEST_F(CheckpointSeriesTest, KeepLastRemovesNothingWhereNothingIsValid) {
  for (const char* name : {"step-1", "step-2"}) {
    write(name);
    truncate(std::string(name) + "/rank-00000.h5");
  }
  EXPECT_THAT(removed_names(1), IsEmpty());
  EXPECT_THAT(names(), SizeIs(2));
}

TEST_F(CheckpointSeriesTest, ALinkIsNotCountedAsTheCheckpointThatItPointsTo) {
  write("step-1");
  write("step-2");
  std::filesystem::create_directory_symlink("step-2", directory_ / "zz-latest");
  EXPECT_THAT(removed_names(1), ElementsAre("step-1"));
  EXPECT_THAT(names(), ElementsAre("step-2", "zz-latest"));
}

TEST_F(CheckpointSeriesTest, KeepLastTakesTheValuesOfASafetensorsFileAlong) {
  for (const char* name : {"step-1.safetensors", "step-2.safetensors"}) write_safetensors(name);
  EXPECT_THAT(removed_names(1), ElementsAre("step-1.safetensors"));
  EXPECT_THAT(names(), ElementsAre("step-2.safetensors", "step-2.safetensors.values.json"));
}

TEST_F(CheckpointSeriesTest, KeepLastLeavesWhatHasOnlyTheNameOfValues) {
  MemoryCheckpoint source("no values");
  source.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
  copy_checkpoint(
      source, *create_safetensors(fs_, directory_ / "step-1.safetensors", source.contents(), {}));
  write_file(directory_ / "step-1.safetensors.values.json", "{\"my\": \"notes\"}");
  write_safetensors("step-2.safetensors");
  EXPECT_THAT(removed_names(1), ElementsAre("step-1.safetensors"));
  EXPECT_THAT(names(), ElementsAre("step-1.safetensors.values.json", "step-2.safetensors",
                                   "step-2.safetensors.values.json"));
}

TEST_F(CheckpointSeriesTest, WhatADeadRemovalLeftGoesWithTheNextOne) {
  write("step-1");
  std::filesystem::rename(directory_ / "step-1", directory_ / "step-1.removing");
  fs_.remove_all(directory_ / "step-1.removing/index.h5");
  write_safetensors("step-2.safetensors");
  std::filesystem::rename(directory_ / "step-2.safetensors",
                          directory_ / "step-2.safetensors.removing");
  write("step-3");
  EXPECT_THAT(removed_names(5), IsEmpty());
  EXPECT_THAT(names(), ElementsAre("step-3"));
}

TEST_F(CheckpointSeriesTest, ADeadRemovalTakesNothingFromAFileOfThatNameWrittenSince) {
  write_safetensors("step-2.safetensors");
  write_file(directory_ / "step-2.safetensors.removing", "an older one");
  EXPECT_THAT(removed_names(1), IsEmpty());
  EXPECT_EQ(latest_name(), "step-2.safetensors");
  EXPECT_THAT(names(), ElementsAre("step-2.safetensors", "step-2.safetensors.values.json"));
}

TEST_F(CheckpointSeriesTest, NothingIsDeletedBeforeTheNewNamesAreDurable) {
  for (const char* name : {"step-1", "step-2", "step-3"}) write(name);
  FaultFileSystem fs(fs_, directory_.path());
  keep_last(fs, directory_.path(), 1);
  EXPECT_EQ(fs.transcript(),
            "rename step-2 step-2.removing\n"
            "rename step-1 step-1.removing\n"
            "sync_directory .\n"
            "remove_all step-2.removing\n"
            "remove_all step-1.removing\n");
}

// Shows E4.
TEST_F(CheckpointSeriesTest, AFailureAtAnyOperationLeavesNoHalfCheckpoint) {
  FaultFileSystem fs(fs_, directory_.path());
  bool is_done = false;
  std::int64_t index = 0;
  for (; !is_done; index += kSampleStep) {
    SCOPED_TRACE(index);
    for (const char* name : {"step-1", "step-2", "step-3"}) {
      if (!fs_.kind_of(directory_ / name)) write(name);
    }
    if (!fs_.kind_of(directory_ / "step-0.safetensors")) write_safetensors("step-0.safetensors");
    fs.fail_operation(index, FaultFileSystem::Fault::from_then_on);
    try {
      keep_last(fs, directory_.path(), 1);
      is_done = true;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
    }
    fs.fail_operation(-1);
    EXPECT_EQ(latest_name(), "step-3");
    for (const std::string& name : names()) {
      if (name.ends_with(".removing") || name.ends_with(".json")) continue;
      SCOPED_TRACE(name);
      std::vector<std::string> findings;
      open_checkpoint(fs_, directory_ / name)->check_files([&](const Finding& finding) {
        findings.push_back(finding.found);
      });
      EXPECT_THAT(findings, IsEmpty());
    }
    keep_last(fs_, directory_.path(), 1);
    EXPECT_THAT(names(), ElementsAre("step-3"));
  }
  EXPECT_GT(index, 20);
}

TEST_F(CheckpointSeriesTest, WhatCannotBeReadIsNotTakenForDamaged) {
  write("step-1");
  write("step-2");
  FaultFileSystem fs(fs_, directory_.path());
  bool is_done = false;
  for (std::int64_t index = 0; !is_done; ++index) {
    SCOPED_TRACE(index);
    fs.fail_operation(index);
    try {
      EXPECT_EQ(latest_valid(fs, directory_.path(), Validation::checksums).path,
                directory_ / "step-2");
      is_done = !fs.has_failed();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
    }
  }
}

/// While it exists, a test run by root acts as another user. (Root may read and write every file.)
class AsNobody {
 public:
  AsNobody() : is_root_(::geteuid() == 0) {
    if (is_root_) become(65534);
  }
  ~AsNobody() {
    if (is_root_) become(0);
  }

 private:
  static void become(uid_t user) { EXPECT_EQ(::seteuid(user), 0); }

  bool is_root_;
};

TEST_F(CheckpointSeriesTest, WhatIsClosedForGoodIsSkippedAndTold) {
  using std::filesystem::perms;
  write("step-1");
  write("step-2");
  std::filesystem::create_symlink("step-8", directory_ / "step-8");
  std::filesystem::create_symlink("step-7", directory_ / "step-6");
  std::filesystem::create_symlink("step-6", directory_ / "step-7");
  for (const char* name : {"step-3", "step-4"}) write(name);
  std::filesystem::permissions(directory_.path(), perms::all);
  std::filesystem::permissions(directory_ / "step-3", perms::none);
  std::filesystem::permissions(directory_ / "step-4", perms::owner_read | perms::others_read);
  write_file(directory_ / "step-5.pt", "PK");
  std::filesystem::permissions(directory_ / "step-5.pt", perms::none);
  LatestValid found;
  std::vector<std::string> removed;
  {
    const AsNobody nobody;
    found = latest();
    removed = removed_names(2);
  }
  EXPECT_EQ(found.path, directory_ / "step-2");
  std::vector<std::string> skipped;
  for (const SkippedCheckpoint& one : found.skipped) {
    EXPECT_THAT(one.why, HasSubstr("a loop of links, or no permission"));
    skipped.push_back(one.path.substr(directory_.path().size() + 1));
  }
  EXPECT_THAT(skipped, ElementsAre("step-8", "step-7", "step-6", "step-5.pt", "step-4", "step-3"));
  EXPECT_THAT(removed, IsEmpty());
  for (const char* name : {"step-3", "step-4"}) {
    std::filesystem::permissions(directory_ / name, perms::owner_all);
  }
}

TEST_F(CheckpointSeriesTest, OneHolderAtATimeHasADirectory) {
  {
    const DirectoryLock lock(directory_.path());
    EXPECT_THAT([&] { DirectoryLock(directory_.path()); },
                ThrowsError(ErrorKind::already_exists, directory_.path()));
  }
  const DirectoryLock lock(directory_.path());
  EXPECT_THAT(names(), IsEmpty());
  EXPECT_THAT([&] { DirectoryLock(directory_ / "none"); },
              ThrowsError(ErrorKind::not_found, "none"));
}

TEST_F(CheckpointSeriesTest, ALockEndsWithItsProcess) {
  int ready[2];
  int stop[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(stop), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(stop[1]);
    const DirectoryLock lock(directory_.path());
    char byte = 0;
    if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
    if (::read(stop[0], &byte, 1) != 0) ::_exit(1);
    ::_exit(0);  // without running any destructor
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT([&] { DirectoryLock(directory_.path()); },
              ThrowsError(ErrorKind::already_exists, "another writer"));
  ::close(stop[1]);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_NO_THROW(DirectoryLock(directory_.path()));
  for (const int fd : {ready[0], ready[1], stop[0]}) ::close(fd);
}

}  // namespace
}  // namespace tessera::formats
