#include "formats/staging/file_states.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "support/temporary_directory.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

namespace stdfs = std::filesystem;

class FileStatesTest : public testing::Test {
 protected:
  FileStatesTest() { std::ofstream(file_) << "bytes"; }

  FileStates states() const { return file_states_at(FileSystem::posix(), tmp_.path()); }
  void require_as(const FileStates& before) const {
    require_file_states(FileSystem::posix(), tmp_.path(), before);
  }

  const test::TemporaryDirectory tmp_;
  const test::TemporaryDirectory other_;
  const std::string file_ = tmp_ / "rank-00000.h5";
  const std::string link_ = other_ / "link.h5";
};

TEST_F(FileStatesTest, ANewOrRemovedHardLinkIsNoChange) {
  const FileStates alone = states();
  stdfs::create_hard_link(file_, link_);
  const FileStates shared = states();
  EXPECT_NO_THROW(require_as(alone));
  stdfs::remove(link_);
  EXPECT_NO_THROW(require_as(shared));
}

TEST_F(FileStatesTest, OtherBytesAreAChangeAlsoUnderALinkAndWithTheOldTime) {
  const auto time = stdfs::last_write_time(file_);
  const FileStates alone = states();
  std::ofstream(file_) << "other";
  EXPECT_THROW(require_as(alone), Error);
  stdfs::last_write_time(file_, time);
  EXPECT_THROW(require_as(alone), Error) << "the ctime tells";
  stdfs::create_hard_link(file_, link_);
  const FileStates shared = states();
  std::ofstream(link_) << "third";
  EXPECT_THROW(require_as(shared), Error);
}

}  // namespace
}  // namespace tessera::formats
