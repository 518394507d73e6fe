#include "formats/staging/shared_work.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/forwarding_file_system.h"
#include "formats/staging/journal.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

/// The local file system. Another process removes a folder once, just before it is synced or
/// listed, or a file in it is opened.
class VanishingFolder final : public ForwardingFileSystem {
 public:
  VanishingFolder() : ForwardingFileSystem(FileSystem::posix()) {}

  std::string removed_before_sync;
  mutable std::string removed_before_list;
  mutable std::string removed_before_open;

  void sync_directory(const std::string& path) override {
    vanish(removed_before_sync, path);
    ForwardingFileSystem::sync_directory(path);
  }
  std::vector<std::string> list_directory(const std::string& path) const override {
    vanish(removed_before_list, path);
    return ForwardingFileSystem::list_directory(path);
  }
  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    vanish(removed_before_open, directory_of(path));
    return ForwardingFileSystem::open(path);
  }

 private:
  static void vanish(std::string& removed, const std::string& path) {
    if (path == removed) FileSystem::posix().remove_all(std::exchange(removed, ""));
  }
};

/// The local file system. As soon as the file `lock` is removed, another process locks the folder
/// and begins its work there.
class WaitedForLock final : public ForwardingFileSystem {
 public:
  explicit WaitedForLock(std::string folder)
      : ForwardingFileSystem(FileSystem::posix()), folder_(std::move(folder)) {}

  /// Removes a folder as std::filesystem does: file by file.
  void remove_all(const std::string& path) override {
    if (path == folder_) {
      for (const std::string& name : list_directory(path)) remove_all(join_path(path, name));
      ::rmdir(path.c_str());
      return;
    }
    ForwardingFileSystem::remove_all(path);
    if (path != folder_ + "/lock") return;
    create(path)->close();
    for (const char* name : {"/command", "/share-0.lock"}) {
      ForwardingFileSystem::remove_all(folder_ + name);
      create(folder_ + name)->close();
    }
  }

 private:
  const std::string folder_;
};

TEST(SharedWorkTest, RemovesNoFileOfTheProcessThatWaitsForTheLock) {
  const test::TemporaryDirectory tmp;
  const std::string folder = tmp / "out.partial.shares";
  WaitedForLock fs(folder);
  SharedWork work(fs, tmp / "out");
  const auto lock = work.lock();
  work.begin({{"plan", "digest"}}, 1, "command");
  const auto share = work.try_lock_share(0);
  work.remove();
  EXPECT_EQ(fs.list_directory(folder),
            (std::vector<std::string>{"command", "lock", "share-0.lock"}));
}

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

TEST(SharedWorkTest, DamagedWorkCanBeDiscardedUnlessAShareIsBeingWritten) {
  const test::TemporaryDirectory tmp;
  FileSystem& fs = FileSystem::posix();
  SharedWork work(fs, tmp / "out");
  {
    const auto lock = work.lock();
    fs.make_directory(tmp / "out.partial");
    const ResumeIdentity identity = SharedWork::with_new_token({{"plan", "digest"}});
    Journal(fs, tmp / "out.partial.journal", identity).sync();
    work.begin(identity, 2, "command");
  }
  fs.remove_all(work.path() + "/work");
  fs.create(work.path() + "/work")->close();
  EXPECT_THAT(
      [&] {
        work.require_same({{"plan", "digest"}}, 2);
      },
      test::ThrowsError(ErrorKind::corruption, "so the file is damaged"));
  {
    const auto share = work.try_lock_share(1);
    EXPECT_THAT([&] { work.discard(); },
                test::ThrowsError(ErrorKind::already_exists, "part 1 is being written"));
  }
  work.discard();
  EXPECT_FALSE(fs.kind_of(work.path()));
  EXPECT_FALSE(fs.kind_of(tmp / "out.partial"));
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

TEST(SharedWorkTest, AWorkerMayLookAtAShareWhileAnotherRemovesTheFolder) {
  const test::TemporaryDirectory tmp;
  VanishingFolder fs;
  SharedWork work(fs, tmp / "out");
  for (const bool is_comparison : {false, true}) {
    const auto lock = work.lock();
    work.mark_complete(0);
    work.write_comparison(0, "equal");
    fs.removed_before_open = work.path();
    if (is_comparison) {
      EXPECT_EQ(work.read_comparison(0, 100), std::nullopt);
    } else {
      EXPECT_FALSE(work.is_complete(0));
    }
  }
}

}  // namespace
}  // namespace tessera::formats
