#include "formats/staging/shared_work.h"

#include <gmock/gmock.h>

#include <string>
#include <utility>
#include <vector>

#include "base/forwarding_file_system.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

/// The local file system. Another process removes a folder once, just before it is synced or
/// listed.
class VanishingFolder final : public ForwardingFileSystem {
 public:
  VanishingFolder() : ForwardingFileSystem(FileSystem::posix()) {}

  std::string removed_before_sync;
  mutable std::string removed_before_list;

  void sync_directory(const std::string& path) override {
    vanish(removed_before_sync, path);
    ForwardingFileSystem::sync_directory(path);
  }
  std::vector<std::string> list_directory(const std::string& path) const override {
    vanish(removed_before_list, path);
    return ForwardingFileSystem::list_directory(path);
  }

 private:
  static void vanish(std::string& removed, const std::string& path) {
    if (path == removed) FileSystem::posix().remove_all(std::exchange(removed, ""));
  }
};

TEST(SharedWorkTest, AnotherWorkerMayFinishAsSoonAsTheLastShareIsComplete) {
  const test::TemporaryDirectory tmp;
  VanishingFolder fs;
  fs.make_directory(tmp / "out.partial");
  SharedWork work(fs, tmp / "out");
  const auto lock = work.lock();
  work.begin({{"plan", "digest"}}, 1, "command");
  work.mark_complete(0);
  EXPECT_TRUE(work.is_complete(0));
  fs.remove_all(work.journal_path(0) + ".done");
  fs.removed_before_sync = work.path();
  EXPECT_NO_THROW(work.mark_complete(0));
  EXPECT_FALSE(fs.kind_of(work.path()));
}

TEST(SharedWorkTest, AWorkerMayAskForTheLockWhileAnotherRemovesTheFolder) {
  const test::TemporaryDirectory tmp;
  VanishingFolder fs;
  SharedWork work(fs, tmp / "out");
  fs.make_directory(work.path());
  fs.removed_before_list = work.path();
  const auto lock = work.lock();
  EXPECT_TRUE(fs.kind_of(work.path() + "/lock"));
  EXPECT_FALSE(work.is_begun());
}

TEST(SharedWorkTest, NoShareIsCompleteOnceTheFolderIsGone) {
  const test::TemporaryDirectory tmp;
  VanishingFolder fs;
  const SharedWork work(fs, tmp / "out");
  EXPECT_FALSE(work.is_complete(0));
}

}  // namespace
}  // namespace tessera::formats
