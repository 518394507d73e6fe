#include "formats/staging/staged_destination.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string_view>

#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/files.h"
#include "support/temporary_directory.h"

namespace tessera::formats {
namespace {

using test::FaultFileSystem;
using test::read_all;
using test::TemporaryDirectory;
using test::ThrowsError;
using test::write_file;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

class StagedDestinationTest : public ::testing::Test {
 protected:
  FileSystem& fs_ = FileSystem::posix();
  TemporaryDirectory tmp_;
  using LeftOver = StagedDestination::LeftOver;
  FaultFileSystem faulty_{fs_, tmp_.path()};

  /// Writes a checkpoint of one file with `text` to `out`.
  void write_directory(FileSystem& fs, std::string_view text, OverwritePolicy overwrite) {
    StagedDestination staged(fs, tmp_ / "out", DestinationKind::directory, overwrite);
    const auto file = fs.create(join_path(staged.staging_path(), "index.h5"));
    file->write_at(0, bytes_of(text));
    file->sync();
    file->close();
    staged.commit();
  }

  std::vector<std::string> names() const { return fs_.list_directory(tmp_.path()); }
};

TEST_F(StagedDestinationTest, ADirectoryAppearsInOneRename) {
  write_directory(faulty_, "new", OverwritePolicy::refuse);
  EXPECT_EQ(faulty_.transcript(),
            "make_directory out.partial\n"
            "create out.partial.journal\n"
            "write out.partial.journal [0, 18)\n"
            "close out.partial.journal\n"
            "create out.partial/index.h5\n"
            "write out.partial/index.h5 [0, 3)\n"
            "sync out.partial/index.h5\n"
            "close out.partial/index.h5\n"
            "sync_directory out.partial\n"
            "rename out.partial out\n"
            "sync_directory .\n"
            "remove_all out.partial.journal\n");
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

TEST_F(StagedDestinationTest, AReplacementIsOneExchange) {
  write_directory(fs_, "old", OverwritePolicy::refuse);
  write_directory(faulty_, "new", OverwritePolicy::replace);
  EXPECT_THAT(faulty_.transcript(), ::testing::EndsWith("sync_directory out.partial\n"
                                                        "exchange out.partial out\n"
                                                        "sync_directory .\n"
                                                        "remove_all out.partial\n"
                                                        "remove_all out.partial.journal\n"));
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "new");
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

TEST_F(StagedDestinationTest, AFileIsStagedUnderItsOwnLock) {
  {
    StagedDestination staged(fs_, tmp_ / "out", DestinationKind::file, OverwritePolicy::refuse);
    const auto file = fs_.open_for_update(staged.staging_path());
    file->write_at(0, bytes_of("x"));
    file->sync();
    file->close();
    EXPECT_THAT(
        [&] {
          StagedDestination(fs_, tmp_ / "out", DestinationKind::file, OverwritePolicy::replace);
        },
        ThrowsError(ErrorKind::already_exists, "out.partial: staging: another process is writing"));
    EXPECT_EQ(fs_.kind_of(tmp_ / "out"), std::nullopt);
    staged.commit();
  }
  EXPECT_EQ(read_all(tmp_ / "out"), "x");
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

/// Locks the journal `path` like a writer on another host, whose lock on a directory nobody sees.
int lock_like_another_host(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct flock whole_file {};
  whole_file.l_type = F_WRLCK;
  EXPECT_EQ(::fcntl(fd, F_OFD_SETLK, &whole_file), 0);
  return fd;
}

TEST_F(StagedDestinationTest, AWriterOnAnotherHostHoldsTheJournal) {
  fs_.make_directory(tmp_ / "out.partial");
  write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n");
  write_file(tmp_ / "out.partial/index.h5", "theirs");
  const int other = lock_like_another_host(tmp_ / "out.partial.journal");
  EXPECT_TRUE(StagedDestination::is_being_written(fs_, tmp_ / "out.partial"));
  const auto is_refused =
      ThrowsError(ErrorKind::already_exists, "out.partial: staging: another process is writing");
  EXPECT_THAT([&] { write_directory(fs_, "ours", OverwritePolicy::refuse); }, is_refused);
  EXPECT_THAT(
      [&] {
        StagedDestination::check(fs_, tmp_ / "out", DestinationKind::directory,
                                 OverwritePolicy::refuse);
      },
      is_refused);
  EXPECT_EQ(read_all(tmp_ / "out.partial/index.h5"), "theirs");
  // Just before it removes its journal, the other writer has renamed its directory.
  fs_.remove_all(tmp_ / "out.partial");
  EXPECT_THAT([&] { write_directory(fs_, "ours", OverwritePolicy::refuse); }, is_refused);
  EXPECT_EQ(names(), std::vector<std::string>{"out.partial.journal"});
  ::close(other);
  write_directory(fs_, "ours", OverwritePolicy::refuse);
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "ours");
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

TEST_F(StagedDestinationTest, TheLockOnTheJournalLastsAsLongAsTheWriter) {
  StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory, OverwritePolicy::refuse);
  staged.reset_journal();
  const int fd = ::open(staged.journal_path().c_str(), O_RDWR | O_CLOEXEC);
  struct flock whole_file {};
  whole_file.l_type = F_WRLCK;
  EXPECT_EQ(::fcntl(fd, F_OFD_SETLK, &whole_file), -1);
  ::close(fd);
}

TEST_F(StagedDestinationTest, WithoutCommitTheOldStaysAndNothingElse) {
  write_directory(fs_, "old", OverwritePolicy::refuse);
  { StagedDestination(fs_, tmp_ / "out", DestinationKind::directory, OverwritePolicy::replace); }
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "old");
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

TEST_F(StagedDestinationTest, AnExistingDestinationIsRefused) {
  write_directory(fs_, "old", OverwritePolicy::refuse);
  EXPECT_THAT([&] { write_directory(fs_, "new", OverwritePolicy::refuse); },
              ThrowsError(ErrorKind::already_exists, "out: destination exists"));
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

TEST_F(StagedDestinationTest, ADestinationThatAppearsMeanwhileIsNotOverwritten) {
  {
    StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory,
                             OverwritePolicy::refuse);
    write_file(tmp_ / "out", "theirs");
    EXPECT_THAT([&] { staged.commit(); }, ThrowsError(ErrorKind::already_exists, "out"));
  }
  EXPECT_EQ(read_all(tmp_ / "out"), "theirs");
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

TEST_F(StagedDestinationTest, WhatADeadProcessLeftIsTakenOverAndEmptied) {
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    const pid_t child = ::fork();
    if (child == 0) {
      StagedDestination staged(fs_, tmp_ / "out", kind, OverwritePolicy::refuse);
      if (kind == DestinationKind::directory) {
        write_file(join_path(staged.staging_path(), "rank-00000.h5"), "x");
        write_file(join_path(staged.staging_path(), "index.h5"), "x");
        write_file(join_path(staged.staging_path(), "rank-00001.h5.partial"), "x");
      }
      ::_exit(0);  // without running any destructor
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(names(), (std::vector<std::string>{"out.partial", "out.partial.journal"}));
    {
      StagedDestination staged(fs_, tmp_ / "out", kind, OverwritePolicy::refuse);
      staged.commit();
    }
    EXPECT_EQ(names(), std::vector<std::string>{"out"});
    EXPECT_TRUE(std::filesystem::is_empty(tmp_ / "out"));
    fs_.remove_all(tmp_ / "out");
  }
}

TEST_F(StagedDestinationTest, WhatCameToLieInTheDestinationMeanwhileStays) {
  fs_.make_directory(tmp_ / "out");
  write_file(tmp_ / "out/index.h5", "old");
  StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory, OverwritePolicy::replace);
  write_file(tmp_ / "out.partial/index.h5", "new");
  write_file(tmp_ / "out/notes.txt", "mine");
  EXPECT_THAT(
      [&] { staged.commit(); },
      ThrowsError(ErrorKind::already_exists, "notes.txt: destination: this file does not belong"));
  EXPECT_EQ(read_all(tmp_ / "out/notes.txt"), "mine");
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "old");
  std::filesystem::remove(tmp_ / "out/notes.txt");
  staged.commit();
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "new");
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatChangesInTheOldCheckpointMeanwhileStays) {
  const std::string file = tmp_ / "out/index.h5";
  const auto write_with_old_time = [&] {
    const auto time = std::filesystem::last_write_time(file);
    write_file(file, "own");
    std::filesystem::last_write_time(file, time);
  };
  const auto put_another_in_its_place = [&] {
    write_file(tmp_ / "another", "own");
    std::filesystem::rename(tmp_ / "another", file);
  };
  const auto add = [&] { write_file(tmp_ / "out/rank-00007.h5", "own"); };
  for (const auto& [change, name] : std::vector<std::pair<std::function<void()>, std::string>>{
           {write_with_old_time, "index.h5"},
           {put_another_in_its_place, "index.h5"},
           {add, "rank-00007.h5"}}) {
    write_directory(fs_, "old", OverwritePolicy::refuse);
    {
      StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory,
                               OverwritePolicy::replace);
      write_file(tmp_ / "out.partial/index.h5", "new");
      change();
      EXPECT_THAT([&] { staged.commit(); },
                  ThrowsError(ErrorKind::already_exists, "out/" + name + ": destination: "));
    }
    EXPECT_EQ(read_all(tmp_ / ("out/" + name)), "own");
    EXPECT_EQ(names(), std::vector<std::string>{"out"});
    fs_.remove_all(tmp_ / "out");
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, ASingleFileThatChangesOrAppearsMeanwhileStays) {
  for (const bool was_there : {true, false}) {
    if (was_there) write_file(tmp_ / "out", "old");
    {
      StagedDestination staged(fs_, tmp_ / "out", DestinationKind::file, OverwritePolicy::replace);
      write_file(tmp_ / "out", "own");
      EXPECT_THAT([&] { staged.commit(); },
                  ThrowsError(ErrorKind::already_exists, "out: destination: "));
    }
    EXPECT_EQ(read_all(tmp_ / "out"), "own");
    EXPECT_EQ(names(), std::vector<std::string>{"out"});
    fs_.remove_all(tmp_ / "out");
  }
}

TEST_F(StagedDestinationTest, WhatALinkLeadsToMayChangeMeanwhileAsItIsNotRemoved) {
  write_directory(fs_, "old", OverwritePolicy::refuse);
  fs_.rename(tmp_ / "out", tmp_ / "elsewhere");
  std::filesystem::create_directory_symlink("elsewhere", tmp_ / "out");
  StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory, OverwritePolicy::replace);
  write_file(tmp_ / "out.partial/index.h5", "new");
  write_file(tmp_ / "elsewhere/index.h5", "own");
  staged.commit();
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "new");
  EXPECT_EQ(read_all(tmp_ / "elsewhere/index.h5"), "own");
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatNoWriterMadeIsNotPublished) {
  for (const auto overwrite : {OverwritePolicy::refuse, OverwritePolicy::replace}) {
    if (overwrite == OverwritePolicy::replace) write_directory(fs_, "old", OverwritePolicy::refuse);
    {
      StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory, overwrite);
      write_file(tmp_ / "out.partial/index.h5", "new");
      write_file(tmp_ / "out.partial/notes.txt", "mine");
      EXPECT_THAT([&] { staged.commit(); },
                  ThrowsError(ErrorKind::already_exists, "out.partial/notes.txt: staging: "));
    }
    EXPECT_EQ(read_all(tmp_ / "out.partial/notes.txt"), "mine");
    fs_.remove_all(tmp_ / "out.partial");
    EXPECT_EQ(names().size(), overwrite == OverwritePolicy::replace ? 1U : 0U);
  }
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "old");
}

TEST_F(StagedDestinationTest, WhatIsSomebodysAtTheStagingPathStays) {
  write_file(tmp_ / "out.partial", "a thesis");
  EXPECT_THAT(
      [&] {
        StagedDestination(fs_, tmp_ / "out", DestinationKind::directory, OverwritePolicy::refuse);
      },
      ThrowsError(ErrorKind::already_exists, "expected an unused name"));
  EXPECT_EQ(read_file(fs_, tmp_ / "out.partial", 100), "a thesis");
  fs_.remove_all(tmp_ / "out.partial");
  std::filesystem::create_directory(tmp_ / "out.partial");
  write_file(tmp_ / "out.partial/chapter", "one");
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    EXPECT_THAT([&] { StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::replace); },
                ThrowsError(ErrorKind::already_exists, "expected an unused name"));
  }
  EXPECT_EQ(read_file(fs_, tmp_ / "out.partial/chapter", 100), "one");
}

// Shows E4.
TEST_F(StagedDestinationTest, WithoutAJournalOnlyWhatIsEmptyIsAWritersWhateverItLooksLike) {
  const auto stage = [&](DestinationKind kind) {
    StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::refuse).commit();
  };
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    fs_.make_directory(tmp_ / "out.partial");
    stage(kind);
    EXPECT_EQ(names(), std::vector<std::string>{"out"});
    fs_.remove_all(tmp_ / "out");
    write_file(tmp_ / "out.partial", "");
    stage(kind);
    EXPECT_EQ(names(), std::vector<std::string>{"out"});
    fs_.remove_all(tmp_ / "out");

    fs_.make_directory(tmp_ / "out.partial");
    write_file(tmp_ / "out.partial/index.h5", "x");
    EXPECT_THAT([&] { stage(kind); },
                ThrowsError(ErrorKind::already_exists, "found a directory without a journal"));
    EXPECT_EQ(read_all(tmp_ / "out.partial/index.h5"), "x");
    fs_.remove_all(tmp_ / "out.partial");
    write_file(tmp_ / "out.partial", std::string(1000, '\0'));
    EXPECT_THAT([&] { stage(kind); },
                ThrowsError(ErrorKind::already_exists, "found a file without a journal"));
    EXPECT_EQ(read_all(tmp_ / "out.partial"), std::string(1000, '\0'));
    fs_.remove_all(tmp_ / "out.partial");
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatIsNeitherFileNorDirectoryIsRefusedByName) {
  const auto expect_refused = [&](const std::string& name, const std::string& found) {
    for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
      for (const auto& judge : {StagedDestination::Judge(),
                                StagedDestination::Judge([](auto&) { return LeftOver::remove; })}) {
        const auto refused =
            ThrowsError(ErrorKind::already_exists, name +
                                                       ": expected an unused name, which is needed "
                                                       "while the checkpoint is written, found " +
                                                       found);
        EXPECT_THAT(
            [&] { StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::refuse, judge); },
            refused);
        EXPECT_THAT(
            [&] {
              StagedDestination::check(fs_, tmp_ / "out", kind, OverwritePolicy::refuse, judge);
            },
            refused);
      }
    }
  };
  for (const auto& [path, rule] :
       {std::pair("out.partial", "staging"), {"out.partial.journal", "journal"}}) {
    const std::string name = std::string(path) + ": " + rule;
    for (const std::string to : {"nowhere", "."}) {
      std::filesystem::create_symlink(to, tmp_ / path);
      expect_refused(name, "a link");
      std::filesystem::remove(tmp_ / path);
    }
    ASSERT_EQ(::mkfifo((tmp_ / path).c_str(), 0600), 0);
    expect_refused(name, "a pipe");
    std::filesystem::remove(tmp_ / path);
    ASSERT_EQ(::mknod((tmp_ / path).c_str(), S_IFSOCK | 0600, 0), 0);
    expect_refused(name, "a socket");
    EXPECT_EQ(names(), std::vector<std::string>{path});
    std::filesystem::remove(tmp_ / path);
  }
  fs_.make_directory(tmp_ / "out.partial.journal");
  expect_refused("out.partial.journal: journal", "a directory");
}

TEST_F(StagedDestinationTest, ALinkThatLeadsNowhereIsNoFreeDestination) {
  std::filesystem::create_symlink("nowhere", tmp_ / "out");
  for (const auto overwrite : {OverwritePolicy::refuse, OverwritePolicy::replace}) {
    for (const std::string name : {"out", "out/"}) {
      EXPECT_THAT(
          [&] { StagedDestination(faulty_, tmp_ / name, DestinationKind::directory, overwrite); },
          ThrowsError(ErrorKind::already_exists,
                      "out: destination: expected an unused name, found a broken link"));
    }
  }
  EXPECT_EQ(faulty_.transcript(), "");
  EXPECT_TRUE(std::filesystem::is_symlink(tmp_ / "out"));
}

TEST_F(StagedDestinationTest, ACheckThrowsWhatStagingWouldAndChangesNothing) {
  const auto check = [&](const StagedDestination::Judge& judge = {}) {
    StagedDestination::check(faulty_, tmp_ / "out", DestinationKind::directory,
                             OverwritePolicy::refuse, judge);
  };
  check();
  fs_.make_directory(tmp_ / "out.partial");
  check();
  write_file(tmp_ / "out.partial/index.h5", "half");
  EXPECT_THAT([&] { check(); }, ThrowsError(ErrorKind::already_exists, "without a journal"));
  write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n0123 {}\n0123 0 0 0\n");
  EXPECT_THAT([&] { check(); }, ThrowsError(ErrorKind::already_exists, "is kept here"));
  for (const LeftOver verdict : {LeftOver::remove, LeftOver::go_on}) {
    check([&](const auto&) { return verdict; });
  }
  {
    const StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory,
                                   OverwritePolicy::refuse,
                                   [](const auto&) { return LeftOver::go_on; });
    EXPECT_THAT([&] { check(); },
                ThrowsError(ErrorKind::already_exists, "another process is writing"));
  }
  write_file(tmp_ / "out", "x");
  EXPECT_THAT([&] { check(); }, ThrowsError(ErrorKind::already_exists, "destination exists"));
  EXPECT_EQ(faulty_.transcript(), "");
  EXPECT_EQ(read_all(tmp_ / "out.partial/index.h5"), "half");
}

// Shows E4.
TEST_F(StagedDestinationTest, KeptWorkOfAnotherFormatIsTold) {
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    const bool is_file = kind == DestinationKind::file;  // then the kept work is a directory
    if (is_file) fs_.make_directory(tmp_ / "out.partial");
    write_file(tmp_ / (is_file ? "out.partial/index.h5" : "out.partial"), "half");
    write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n0123 {}\n0123 0 0 0\n");
    const std::string found = is_file ? "a directory" : "a file";
    for (const auto& judge : {StagedDestination::Judge(),
                              StagedDestination::Judge([](auto&) { return LeftOver::go_on; })}) {
      EXPECT_THAT(
          [&] { StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::refuse, judge); },
          ThrowsError(ErrorKind::already_exists, "to another format left its work here: " + found));
    }
    EXPECT_EQ(names(), (std::vector<std::string>{"out.partial", "out.partial.journal"}));
    StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::refuse, [](auto&) {
      return LeftOver::remove;
    }).commit();
    EXPECT_EQ(names(), std::vector<std::string>{"out"});
    fs_.remove_all(tmp_ / "out");
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, WhereverAWriterDiesTheNextOneTakesOver) {
  const auto write = [&](FileSystem& fs, DestinationKind kind, const std::string& text) {
    StagedDestination staged(fs, tmp_ / "out", kind, OverwritePolicy::replace);
    const bool is_file = kind == DestinationKind::file;
    const std::string path = staged.staging_path() + (is_file ? "" : "/index.h5");
    const auto file = is_file ? fs.open_for_update(path) : fs.create(path);
    file->write_at(0, bytes_of(text));
    file->close();
    staged.reset_journal();  // as a writer does that has listed blocks in the journal
    staged.commit();
  };
  bool has_left_old = false;
  const auto kill_everywhere = [&](DestinationKind kind, bool replaces) {
    const std::string path = tmp_ / (kind == DestinationKind::file ? "out" : "out/index.h5");
    bool has_failed = true;
    for (std::int64_t i = 0; has_failed; ++i) {
      SCOPED_TRACE("operation " + std::to_string(i));
      ASSERT_LT(i, 100);
      fs_.remove_all(tmp_ / "out");
      if (replaces) write(fs_, kind, "old");
      faulty_.fail_operation(i, FaultFileSystem::Fault::from_then_on);
      try {
        write(faulty_, kind, "new");
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io);
      }
      has_failed = faulty_.has_failed();
      has_left_old |=
          fs_.kind_of(tmp_ / "out.partial") && fs_.kind_of(path) && read_all(path) == "new";
      write(fs_, kind, "newer");
      EXPECT_EQ(read_all(path), "newer");
      EXPECT_EQ(names(), std::vector<std::string>{"out"});
    }
  };
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    for (const bool replaces : {false, true}) kill_everywhere(kind, replaces);
  }
  EXPECT_TRUE(has_left_old);
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatIsLeftOfWorkMayBeGoneOnWith) {
  const auto put_left_over = [&](DestinationKind kind) {
    if (kind == DestinationKind::directory) fs_.make_directory(tmp_ / "out.partial");
    const bool is_file = kind == DestinationKind::file;
    write_file(tmp_ / (is_file ? "out.partial" : "out.partial/index.h5"), "half");
    write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n");
    return tmp_ / (is_file ? "out.partial" : "out.partial/index.h5");
  };
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    const std::string work = put_left_over(kind);
    const auto go_on = [&](const StagedDestination& staged) {
      EXPECT_EQ(read_all(staged.journal_path()), "tessera-journal 1\n");
      return LeftOver::go_on;
    };
    for (int i = 0; i < 2; ++i) {  // the destructor removes no left-over work
      StagedDestination staged(fs_, tmp_ / "out", kind, OverwritePolicy::refuse, go_on);
      EXPECT_TRUE(staged.has_left_over());
      EXPECT_EQ(read_all(work), "half");
    }
    const auto refuse = [](const StagedDestination&) -> LeftOver {
      throw Error(ErrorKind::mismatch, {}, "other work");
    };
    EXPECT_THAT(
        [&] { StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::refuse, refuse); },
        ThrowsError(ErrorKind::mismatch, "other work"));
    EXPECT_EQ(read_all(work), "half");
    {
      StagedDestination staged(fs_, tmp_ / "out", kind, OverwritePolicy::refuse,
                               [](const StagedDestination&) { return LeftOver::remove; });
      EXPECT_FALSE(staged.has_left_over());
      EXPECT_EQ(names(), (std::vector<std::string>{"out.partial", "out.partial.journal"}));
      EXPECT_TRUE(std::filesystem::is_empty(tmp_ / "out.partial"));
    }
    EXPECT_TRUE(names().empty());
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatIsToBeKeptStaysUnlessCommitted) {
  {
    StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory,
                             OverwritePolicy::refuse);
    staged.keep();
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"out.partial", "out.partial.journal"}));
  StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory, OverwritePolicy::refuse,
                           [](const StagedDestination&) { return LeftOver::go_on; });
  staged.commit();
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

// Shows E4.
TEST_F(StagedDestinationTest, WhoKnowsNothingOfJournalsLeavesKeptWorkAlone) {
  const auto put_work = [&](DestinationKind kind, const std::string& journal) {
    if (kind == DestinationKind::directory) fs_.make_directory(tmp_ / "out.partial");
    write_file(tmp_ / (kind == DestinationKind::file ? "out.partial" : "out.partial/index.h5"),
               "half");
    write_file(tmp_ / "out.partial.journal", journal);
  };
  const std::string no_blocks = "tessera-journal 1\n0123 {" + std::string(100'000, ' ') + "}\n";
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    const auto stage = [&] {
      StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::refuse).commit();
    };
    const std::string work = kind == DestinationKind::file ? "out.partial" : "out.partial/index.h5";
    const std::string one_block = no_blocks + "0123 0 0 0\n";
    put_work(kind, one_block);
    EXPECT_THAT(stage, ThrowsError(ErrorKind::already_exists,
                                   "out.partial: staging: the work of an interrupted"));
    EXPECT_EQ(read_all(tmp_ / work), "half");
    EXPECT_EQ(read_all(tmp_ / "out.partial.journal"), one_block);
    for (const std::string& nothing_kept : {no_blocks, no_blocks + "0123 0", std::string()}) {
      for (const std::string& name : names()) fs_.remove_all(tmp_ / name);
      put_work(kind, nothing_kept);
      stage();
      EXPECT_EQ(names(), std::vector<std::string>{"out"});
    }
    fs_.remove_all(tmp_ / "out");
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatSomebodyHasPutIntoWorkThatFailsStaysAlone) {
  const std::vector<std::string> own = {".metadata",         "__0_0.distcp",
                                        "__12_0.distcp",     "index.h5.partial",
                                        "model.safetensors", "model-00001-of-00002.safetensors",
                                        "rank-00000.h5",     "model.safetensors.index.json",
                                        "rank-00001.h5",     "model.safetensors.values.json"};
  const std::vector<std::string> foreign = {"__0_.distcp",      "a.h5",      "index.h5.bak",
                                            "mine.safetensors", "notes.txt", "rank-a.h5"};
  {
    const StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory,
                                   OverwritePolicy::refuse);
    for (const auto& name : own) write_file(tmp_ / ("out.partial/" + name), "half");
    for (const auto& name : foreign) write_file(tmp_ / ("out.partial/" + name), "mine");
    fs_.make_directory(tmp_ / "out.partial/rank-00002.h5");
  }
  EXPECT_EQ(names(), std::vector<std::string>{"out.partial"});
  std::vector<std::string> left = foreign;
  left.insert(left.end() - 1, "rank-00002.h5");
  EXPECT_EQ(fs_.list_directory(tmp_ / "out.partial"), left);
  EXPECT_THAT([&] { write_directory(fs_, "new", OverwritePolicy::refuse); },
              ThrowsError(ErrorKind::already_exists, "found a directory without a journal"));
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatComesToLieInTheDestinationIsToBeOfItsFormat) {
  for (const auto& [own, foreign] :
       std::vector<std::pair<std::string, std::string>>{{"index.h5", "adapter_model.safetensors"},
                                                        {".metadata", "rank.h5"},
                                                        {"model.safetensors", "results.h5"}}) {
    const std::string path = tmp_ / own.substr(0, 4);
    fs_.make_directory(path);
    write_file(join_path(path, own), "old");
    StagedDestination staged(fs_, path, DestinationKind::directory, OverwritePolicy::replace);
    write_file(join_path(path, foreign), "mine");
    EXPECT_THAT([&] { staged.commit(); },
                ThrowsError(ErrorKind::already_exists,
                            foreign + ": destination: this file does not belong"));
    EXPECT_EQ(read_all(join_path(path, foreign)), "mine");
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatHasTakenTheStagingPathOfWorkThatFailsStays) {
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    {
      const StagedDestination staged(fs_, tmp_ / "out", kind, OverwritePolicy::refuse);
      fs_.rename(tmp_ / "out.partial", tmp_ / "elsewhere");
      write_file(tmp_ / "out.partial", "mine");
    }
    EXPECT_EQ(read_all(tmp_ / "out.partial"), "mine");
    fs_.remove_all(tmp_ / "out.partial");
    fs_.remove_all(tmp_ / "elsewhere");
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatWasReplacedAndCannotBeRemovedIsTold) {
  const auto left_over = [&] { return StagedDestination::left_over_at(fs_, tmp_ / "out"); };
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    const auto replace = [&](FileSystem& fs) {
      StagedDestination(fs, tmp_ / "out", kind, OverwritePolicy::replace).commit();
    };
    replace(fs_);
    EXPECT_EQ(left_over(), std::nullopt);
    faulty_.fail_operation(-1);
    replace(faulty_);
    const std::int64_t num_operations = faulty_.num_operations();
    int num_left = 0;
    for (std::int64_t index = num_operations - 6; index < num_operations; ++index) {
      faulty_.fail_operation(index, FaultFileSystem::Fault::from_then_on);
      try {
        replace(faulty_);
      } catch (const Error&) {
      }
      num_left += left_over().has_value() ? 1 : 0;
      faulty_.fail_operation(-1);
      replace(fs_);
      EXPECT_EQ(names(), std::vector<std::string>{"out"});
    }
    EXPECT_GT(num_left, 0);
    fs_.remove_all(tmp_ / "out");
  }
  {
    const StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory,
                                   OverwritePolicy::refuse);
    EXPECT_EQ(left_over(), std::nullopt);  // a writer is at work
  }
  fs_.make_directory(tmp_ / "out.partial");
  EXPECT_EQ(left_over(), std::nullopt);  // not Tessera's
  write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n0123 {}\n0123 0 0 0\n");
  EXPECT_EQ(left_over(), std::nullopt);  // kept work
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatIsLeftAndCannotBeRemovedIsToldByTheNextWriter) {
  fs_.make_directory(tmp_ / "out.partial");
  write_file(tmp_ / "out.partial/index.h5", "half");
  write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n");
  int num_told = 0;
  for (std::int64_t index = 0; fs_.kind_of(tmp_ / "out.partial"); ++index) {
    ASSERT_LT(index, 100);
    faulty_.fail_operation(index);
    try {
      write_directory(faulty_, "new", OverwritePolicy::refuse);
    } catch (const Error& error) {
      const std::string text = error.what();
      if (text.find("out.partial: staging: cannot remove what an earlier run left here: ") !=
          std::string::npos) {
        ++num_told;
        EXPECT_THAT(text, ::testing::EndsWith(" (remove it yourself)"));
        EXPECT_EQ(error.kind(), ErrorKind::io);
        EXPECT_TRUE(fs_.kind_of(tmp_ / "out.partial.journal"));
      }
    }
  }
  EXPECT_GT(num_told, 1);
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatSomebodyPutsIntoWorkThatIsLeftIsKnownByItsName) {
  fs_.make_directory(tmp_ / "out.partial");
  write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n0123 {}\n");
  write_file(tmp_ / "out.partial/rank-00000.h5", "half");
  write_file(tmp_ / "out.partial/mine.safetensors", "mine");
  EXPECT_THAT([&] { write_directory(fs_, "new", OverwritePolicy::refuse); },
              ThrowsError(ErrorKind::already_exists,
                          "mine.safetensors: staging: this file does not belong"));
  EXPECT_EQ(read_all(tmp_ / "out.partial/mine.safetensors"), "mine");
  EXPECT_EQ(read_all(tmp_ / "out.partial/rank-00000.h5"), "half");
}

// Shows E4.
TEST_F(StagedDestinationTest, WhatSomebodyPutsIntoWorkInProgressStays) {
  const auto stage = [&] {
    StagedDestination(fs_, tmp_ / "out", DestinationKind::directory, OverwritePolicy::refuse,
                      [](const auto&) { return LeftOver::remove; });
  };
  fs_.make_directory(tmp_ / "out.partial");
  write_file(tmp_ / "out.partial.journal", "tessera-journal 1\n");
  write_file(tmp_ / "out.partial/index.h5", "half");
  for (const std::string name : {"a.json", "b.h5"}) {
    std::filesystem::create_directories(tmp_ / ("out.partial/" + name));
    write_file(tmp_ / ("out.partial/" + name + "/chapter"), "one");
    EXPECT_THAT(stage, ThrowsError(ErrorKind::already_exists, "out.partial/" + name + ": staging"));
    EXPECT_EQ(read_all(tmp_ / ("out.partial/" + name + "/chapter")), "one");
    fs_.remove_all(tmp_ / ("out.partial/" + name));
  }
  write_file(tmp_ / "out.partial/notes.json", "mine");
  EXPECT_THAT(stage, ThrowsError(ErrorKind::already_exists,
                                 "notes.json: staging: this file does not belong"));
  EXPECT_EQ(read_all(tmp_ / "out.partial/notes.json"), "mine");
  EXPECT_EQ(read_all(tmp_ / "out.partial/index.h5"), "half");
}

// Shows E4.
TEST_F(StagedDestinationTest, AJournalThatIsALinkHidesNoWork) {
  for (const DestinationKind kind : {DestinationKind::file, DestinationKind::directory}) {
    if (kind == DestinationKind::directory) fs_.make_directory(tmp_ / "out.partial");
    const std::string work = kind == DestinationKind::file ? "out.partial" : "out.partial/index.h5";
    write_file(tmp_ / work, "half");
    std::filesystem::create_symlink("on-a-disk-that-is-gone", tmp_ / "out.partial.journal");
    const auto never = [](const StagedDestination&) { return LeftOver::remove; };
    for (const auto& judge : {StagedDestination::Judge(), StagedDestination::Judge(never)}) {
      EXPECT_THAT(
          [&] { StagedDestination(fs_, tmp_ / "out", kind, OverwritePolicy::refuse, judge); },
          ThrowsError(ErrorKind::already_exists,
                      "out.partial.journal: journal: expected an unused name"));
    }
    EXPECT_EQ(read_all(tmp_ / work), "half");
    for (const std::string& name : names()) fs_.remove_all(tmp_ / name);
  }
}

// Shows E4.
TEST_F(StagedDestinationTest, AJournalWithoutItsWorkIsRemovedAndNothingElse) {
  write_file(tmp_ / "out.partial.journal", "tessera-journal 1\nof work that is gone");
  write_directory(fs_, "new", OverwritePolicy::refuse);
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  write_file(tmp_ / "out.partial.journal", "my notes");
  EXPECT_THAT([&] { write_directory(fs_, "newer", OverwritePolicy::replace); },
              ThrowsError(ErrorKind::already_exists, "found another file"));
  EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "new");
  EXPECT_EQ(read_all(tmp_ / "out.partial.journal"), "my notes");
  EXPECT_EQ(names(), (std::vector<std::string>{"out", "out.partial.journal"}));
}

TEST_F(StagedDestinationTest, AFailureAtAnyOperationLeavesTheDestinationAsItWas) {
  for (const bool replaces : {false, true}) {
    if (replaces) write_directory(fs_, "old", OverwritePolicy::refuse);
    bool succeeded = false;
    for (std::int64_t i = 0; !succeeded; ++i) {
      SCOPED_TRACE("operation " + std::to_string(i));
      ASSERT_LT(i, 100);
      faulty_.fail_operation(i);
      try {
        write_directory(faulty_, "new", OverwritePolicy::replace);
        succeeded = true;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io);
        EXPECT_EQ(fs_.kind_of(tmp_ / "out").has_value(), replaces);
        if (replaces) {
          EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "old");
        }
      }
    }
    EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "new");
    fs_.remove_all(tmp_ / "out");
    fs_.remove_all(tmp_ / "out.partial");
  }
}

TEST_F(StagedDestinationTest, WhatWasPublishedIsUndoneUnlessCommitted) {
  for (const bool replaces : {false, true}) {
    if (replaces) write_directory(fs_, "old", OverwritePolicy::refuse);
    {
      StagedDestination staged(fs_, tmp_ / "out", DestinationKind::directory,
                               OverwritePolicy::replace);
      write_file(join_path(staged.staging_path(), "index.h5"), "new");
      staged.publish();
      EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "new");
    }
    EXPECT_EQ(fs_.kind_of(tmp_ / "out").has_value(), replaces);
    if (replaces) {
      EXPECT_EQ(read_all(tmp_ / "out/index.h5"), "old");
    }
    EXPECT_EQ(fs_.kind_of(tmp_ / "out.partial"), std::nullopt);
  }
}

TEST_F(StagedDestinationTest, ADestinationNeedsANameOfItsOwn) {
  for (const std::string path : {"", "/", ".", "..", "a/..", "a/./"}) {
    EXPECT_THAT(
        [&] { StagedDestination(fs_, path, DestinationKind::directory, OverwritePolicy::replace); },
        ThrowsError(ErrorKind::invalid_argument, "a path that ends in a name"))
        << path;
  }
  StagedDestination staged(fs_, tmp_ / "out///", DestinationKind::directory,
                           OverwritePolicy::refuse);
  EXPECT_EQ(staged.staging_path(), tmp_ / "out.partial");
}

}  // namespace
}  // namespace tessera::formats
