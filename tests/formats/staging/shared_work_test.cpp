#include "formats/staging/shared_work.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "base/current_stop.h"
#include "base/forwarding_file_system.h"
#include "formats/staging/journal.h"
#include "formats/staging/staged_destination.h"
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

TEST(SharedWorkTest, WorkOfAnotherVersionIsRefused) {
  const test::TemporaryDirectory tmp;
  FileSystem& fs = FileSystem::posix();
  SharedWork work(fs, tmp / "out");
  const auto lock = work.lock();
  work.begin({{"plan", "digest"}}, 2, "command");
  EXPECT_NO_THROW(work.require_same({{"plan", "digest"}}, 2));
  fs.remove_all(work.path() + "/work");
  const std::string text = "tessera-journal 2\nwhat will come";
  fs.create(work.path() + "/work")->write_at(0, std::as_bytes(std::span(text)));
  EXPECT_THAT(
      [&] {
        work.require_same({{"plan", "digest"}}, 2);
      },
      test::ThrowsError(ErrorKind::corruption, "expected the source and options of the workers"));
}

/// From now on, byte-range locks fail in this process as on a file system without locks.
bool make_locks_unavailable() {
  std::array filter{
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 3),
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args) + 8),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_OFD_SETLK, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOLCK),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(SharedWorkTest, AFileSystemWithoutLocksIsRefused) {
  const test::TemporaryDirectory tmp;
  SharedWork work(FileSystem::posix(), tmp / "out");
  FileSystem::posix().make_directory(work.path());
  const auto refused = [&](const auto& lock) {
    if (!make_locks_unavailable()) ::_exit(2);
    try {
      lock();
    } catch (const Error& error) {
      std::cerr << error.what();
      ::_exit(error.kind() == ErrorKind::unsupported ? 3 : 1);
    }
    ::_exit(0);
  };
  constexpr const char* kMessage = "out.partial.shares: shared work: expected .*lock";
  EXPECT_EXIT(refused([&] { work.lock(); }), ::testing::ExitedWithCode(3), kMessage);
  EXPECT_EXIT(refused([&] { work.try_lock_share(0); }), ::testing::ExitedWithCode(3), kMessage);
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

// A suspended worker may hold the lock for hours.
TEST(SharedWorkTest, TidyingNeverWaitsForTheLock) {
  const test::TemporaryDirectory tmp;
  FileSystem& fs = FileSystem::posix();
  SharedWork work(fs, tmp / "out");
  {
    const auto lock = work.lock();
    work.begin({{"plan", "digest"}}, 1, "command");
    work.remove_ended();  // would never return if it waited
    EXPECT_TRUE(fs.kind_of(work.path() + "/work"));
  }
  work.remove_ended();
  EXPECT_FALSE(fs.kind_of(work.path()));
}

TEST(SharedWorkTest, FinishingRemovesTheJournalThatADeadWorkerLeft) {
  const test::TemporaryDirectory tmp;
  FileSystem& fs = FileSystem::posix();
  SharedWork work(fs, tmp / "out");
  const std::string journal = tmp / "out.partial.journal";
  for (const bool is_of_another : {false, true}) {
    const auto lock = work.lock();
    const ResumeIdentity identity = SharedWork::with_new_token({{"plan", "digest"}});
    const ResumeIdentity other = SharedWork::with_new_token({{"plan", "digest"}});
    Journal(fs, journal, is_of_another ? other : identity).sync();
    work.begin(identity, 1, "command");
    work.clean_up();
    EXPECT_EQ(fs.kind_of(journal).has_value(), is_of_another);
  }
}

// Such work has no token.
TEST(SharedWorkTest, WorkOfAnEarlierReleaseIsKnownUntilTheExchange) {
  const test::TemporaryDirectory tmp;
  FileSystem& fs = FileSystem::posix();
  StagedDestination staged(fs, tmp / "out", DestinationKind::directory, OverwritePolicy::replace);
  const ResumeIdentity identity{{"plan", "digest"}};
  Journal(fs, staged.journal_path(), identity).sync();
  SharedWork work(fs, tmp / "out");
  const auto lock = work.lock();
  work.begin(identity, 1, "command");
  ASSERT_TRUE(work.is_begun());
  work.begin_exchange();
  staged.reset_journal_for_exchange();
  EXPECT_TRUE(work.is_begun());
}

/// Runs as another user than root, as long as this object lives.
class OtherUser {
 public:
  OtherUser() { become(65534); }
  ~OtherUser() { become(0); }

 private:
  static void become(uid_t user) { EXPECT_EQ(::seteuid(user), 0); }
};

TEST(SharedWorkTest, AClosedFolderOfAnotherUserIsRefusedWithAdvice) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root has files of another user";
  const test::TemporaryDirectory tmp;
  FileSystem& fs = FileSystem::posix();
  std::filesystem::permissions(tmp.path(), std::filesystem::perms::all);
  const SharedWork work(fs, tmp / "out");
  fs.make_directory(work.path());
  std::filesystem::permissions(work.path(), std::filesystem::perms::owner_all);
  const OtherUser user;
  EXPECT_THAT([&] { work.is_begun(); },
              test::ThrowsError(ErrorKind::already_exists,
                                "found a closed folder of another user (rename or remove it)"));
}

TEST(SharedWorkTest, ARequestToStopEndsTheWaitForTheLock) {
  const test::TemporaryDirectory tmp;
  SharedWork work(FileSystem::posix(), tmp / "out");
  const auto lock = work.lock();
  std::stop_source stop;
  stop.request_stop();
  const tessera::detail::CurrentStop current(stop.get_token());
  EXPECT_THAT([&] { work.lock(); }, test::ThrowsError(ErrorKind::interrupted, "interrupted"));
}

TEST(SharedWorkTest, WhatAWorkerKilledWhileItRemovedTheFolderLeftIsTidied) {
  const test::TemporaryDirectory tmp;
  FileSystem& fs = FileSystem::posix();
  SharedWork work(fs, tmp / "out");
  const auto leave = [&](const std::vector<std::string>& names) {
    fs.make_directory(work.path());
    for (const std::string& name : names) fs.create(work.path() + "/" + name)->close();
  };
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"command", "lock", "share-0", "share-1.done"}, {"lock"}, {}}) {
    leave(names);
    work.remove_ended();
    EXPECT_FALSE(fs.kind_of(work.path()));
  }
  leave({"base-0", "lock", "share-0"});
  work.remove_ended();
  EXPECT_EQ(fs.list_directory(work.path()), (std::vector<std::string>{"base-0", "lock"}));
  fs.remove_all(work.path());
  leave({"lock", "notes.txt"});
  work.remove_ended();
  EXPECT_EQ(fs.list_directory(work.path()), (std::vector<std::string>{"lock", "notes.txt"}));
}

}  // namespace
}  // namespace tessera::formats
