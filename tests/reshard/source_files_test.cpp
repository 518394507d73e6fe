#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "reshard/resume_identity.h"
#include "support/error_matchers.h"
#include "support/fixtures.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {
namespace {

class SourceFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::copy(test::fixture("safetensors/valid/single.safetensors"), path_);
  }
  /// Replaces the file by a new file with the same bytes and a later modification time.
  void replace() {
    std::filesystem::copy(path_, path_ + ".new");
    std::filesystem::last_write_time(
        path_ + ".new", std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
    std::filesystem::rename(path_ + ".new", path_);
  }

  test::TemporaryDirectory tmp_;
  const std::string path_ = tmp_ / "model.safetensors";
};

TEST_F(SourceFilesTest, AFileThatChangesWhileTheSourceIsOpenedCountsAsChanged) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  replace();  // after its header was read
  const FileStates states = files.states_of(*reader);
  EXPECT_NE(states, source_file_states(*reader));
  const Plan plan = plan_reshard(reader->contents(), path_, {.format = formats::Format::native});
  EXPECT_THAT(
      [&] {
        move_checkpoint(plan, *reader, FileSystem::posix(), tmp_ / "moved",
                        {.format = formats::Format::native}, {.source_files = states});
      },
      test::ThrowsError(ErrorKind::mismatch, "model.safetensors: source file: expected"));
  EXPECT_FALSE(std::filesystem::exists(tmp_ / "moved"));
}

TEST_F(SourceFilesTest, AFileThatIsReplacedAfterItWasOpenedIsRefused) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  EXPECT_NO_THROW(files.require_unchanged());
  replace();
  EXPECT_THAT([&] { files.require_unchanged(); },
              test::ThrowsError(ErrorKind::mismatch, "model.safetensors: file: expected the file"));
  std::filesystem::remove(path_);
  EXPECT_NO_THROW(files.require_unchanged());
}

// `cp -p` and `rsync -t` give a new file the time of the old one.
TEST_F(SourceFilesTest, AnotherFileOfTheSameSizeAndTimeIsRefused) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  const FileStates states = files.states_of(*reader);
  const auto time = std::filesystem::last_write_time(path_);
  replace();
  std::filesystem::last_write_time(path_, time);
  EXPECT_THAT([&] { files.require_unchanged(); },
              test::ThrowsError(ErrorKind::mismatch, "found another file of the same size"));
  const Plan plan = plan_reshard(reader->contents(), path_, {.format = formats::Format::native});
  EXPECT_THAT(
      [&] {
        move_checkpoint(plan, *reader, FileSystem::posix(), tmp_ / "moved",
                        {.format = formats::Format::native}, {.source_files = states});
      },
      test::ThrowsError(ErrorKind::mismatch, "found another file of the same size"));
  EXPECT_FALSE(std::filesystem::exists(tmp_ / "moved"));
}

// The file that was there first is there again at the end.
TEST_F(SourceFilesTest, AFileThatIsReplacedOnlyForTheOpeningIsRefused) {
  const SourceFiles files;
  files.states_of(*formats::open_checkpoint(FileSystem::posix(), path_));
  std::filesystem::rename(path_, path_ + ".first");
  std::filesystem::copy(path_ + ".first", path_);
  std::filesystem::last_write_time(path_, std::filesystem::last_write_time(path_ + ".first"));
  EXPECT_THAT([&] { files.file_system().open(path_); },
              test::ThrowsError(ErrorKind::mismatch, "model.safetensors: file: expected the file"));
  std::filesystem::rename(path_ + ".first", path_);
  EXPECT_NO_THROW(files.file_system().open(path_));
  EXPECT_NO_THROW(files.require_unchanged());
}

// A save with `base` links files of the source, the removal of an old checkpoint unlinks them.
TEST_F(SourceFilesTest, LinksAndPermissionsAreNoChange) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  std::filesystem::create_hard_link(path_, path_ + ".link");
  EXPECT_NO_THROW(files.require_unchanged());
  std::filesystem::remove(path_ + ".link");
  std::filesystem::permissions(path_, std::filesystem::perms::owner_read);
  EXPECT_NO_THROW(files.require_unchanged());
}

TEST_F(SourceFilesTest, AFileThatStaysIsUnchanged) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  EXPECT_EQ(files.states_of(*reader), source_file_states(*reader));
}

TEST_F(SourceFilesTest, TheFirstLookAtAFileAnswersLaterQuestions) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  const FileStates states = files.states_of(*reader);
  replace();
  EXPECT_EQ(files.states_of(*reader), states);
  std::filesystem::remove(path_);
  EXPECT_EQ(files.file_system().kind_of(path_), FileKind::regular);
  EXPECT_EQ(files.states_of(*reader), states);
}

TEST_F(SourceFilesTest, AMissingFileIsLookedForAgain) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  std::filesystem::rename(path_, path_ + ".aside");
  const SourceFiles others;
  EXPECT_EQ(others.states_of(*reader).at(path_).words, "not there");
  EXPECT_EQ(others.file_system().kind_of(path_), std::nullopt);
  std::filesystem::rename(path_ + ".aside", path_);
  EXPECT_EQ(others.file_system().kind_of(path_), FileKind::regular);
}

// A run that resumes compares the files that the plan was made of, not those of a moment later.
TEST_F(SourceFilesTest, TheIdentityOfAMoveHasTheStatesAtTheOpening) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  const FileStates states = files.states_of(*reader);
  const Plan plan = plan_reshard(reader->contents(), path_, {.format = formats::Format::native});
  const auto before = resume_identity(plan, *reader, {}, {.format = formats::Format::native});
  replace();
  const auto now = resume_identity(plan, *reader, {}, {.format = formats::Format::native});
  EXPECT_NE(now, before);
  EXPECT_EQ(resume_identity(plan, *reader, {}, {.format = formats::Format::native}, states),
            before);
}

}  // namespace
}  // namespace tessera::reshard
