#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

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

TEST_F(SourceFilesTest, AFileThatStaysIsUnchanged) {
  const SourceFiles files;
  const auto reader = formats::open_checkpoint(files.file_system(), path_);
  EXPECT_EQ(files.states_of(*reader), source_file_states(*reader));
}

}  // namespace
}  // namespace tessera::reshard
