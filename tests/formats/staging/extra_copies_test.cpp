#include "formats/staging/extra_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "formats/native_checkpoint.h"
#include "formats/signatures.h"
#include "formats/staging/staged_work.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

using test::FaultFileSystem;
using test::files_of;
using test::kSampleStep;
using test::read_all;
using test::TemporaryDirectory;
using test::ThrowsError;
using test::write_file;
using Fault = FaultFileSystem::Fault;
using Names = std::vector<std::string>;

/// Native checkpoints of one tiny file, staged with extra files.
class ExtraCopiesTest : public ::testing::Test {
 protected:
  ExtraCopiesTest() {
    fs_.make_directory(tmp_ / "source");
    write_file(tmp_ / "source/config.json", "{}");
    write_file(tmp_ / "source/vocab.txt", std::string(3 << 20, 'v'));
  }

  std::vector<ExtraFile> extra_files() const {
    std::vector<ExtraFile> files;
    for (const std::string name : {"config.json", "vocab.txt"}) {
      const std::string path = tmp_ / ("source/" + name);
      files.push_back({path, name, fs_.open(path)->nbytes(), file_state(path)});
    }
    return files;
  }

  WorkOptions options(bool has_journal, KeptWork kept_work = KeptWork::discard) const {
    CreateOptions create{.overwrite = OverwritePolicy::replace, .extra_files = extra_files()};
    if (has_journal) create.journal = {.kept_work = kept_work};
    return work_options(create);
  }

  /// Returns bytes that begin with a native file's signature.
  static std::string index(const std::string& text) {
    return std::string(detail::kNativeSignature) + text;
  }

  /// Writes a checkpoint at `out`: `index(text)` and the extra files of `work`.
  void write(FileSystem& fs, const std::string& text, const WorkOptions& work) {
    const std::string bytes = index(text);
    StagedWork staged(fs, tmp_ / "out", DestinationKind::directory, work);
    const auto file = fs.create(join_path(staged.staging_path(), "index.h5"));
    file->write_at(0, std::as_bytes(std::span(bytes)));
    file->sync();
    file->close();
    if (staged.journal() != nullptr) staged.journal()->note({{0, 0}, 0}, {.range = {0, 3}});
    staged.commit();
  }

  std::map<std::string, std::string> expected(const std::string& text) const {
    auto files = files_of(tmp_ / "source");
    files["index.h5"] = index(text);
    return files;
  }
  Names names() const { return fs_.list_directory(tmp_.path()); }

  FileSystem& fs_ = FileSystem::posix();
  TemporaryDirectory tmp_;
  FaultFileSystem faulty_{fs_, tmp_.path()};
};

// Shows E4.
TEST_F(ExtraCopiesTest, AFailureAtAnyOperationLeavesTheDestinationAsItWas) {
  for (const bool has_journal : {false, true}) {
    for (const bool replaces : {false, true}) {
      bool has_failed = true;
      for (std::int64_t i = 0; has_failed; i += kSampleStep) {
        SCOPED_TRACE("operation " + std::to_string(i));
        ASSERT_LT(i, 200);
        if (replaces) write(fs_, "old", options(has_journal));
        faulty_.fail_operation(i, Fault::short_write);
        try {
          write(faulty_, "new", options(has_journal));
          EXPECT_EQ(files_of(tmp_ / "out"), expected("new"));
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
          EXPECT_EQ(fs_.kind_of(tmp_ / "out").has_value(), replaces);
          if (replaces) {
            EXPECT_EQ(files_of(tmp_ / "out"), expected("old"));
          }
          EXPECT_EQ(fs_.kind_of(tmp_ / "out.partial"), std::nullopt);
        }
        has_failed = faulty_.has_failed();
        fs_.remove_all(tmp_ / "out");  // out.partial and its journal stay for the next writer
      }
    }
  }
}

// Shows E4.
TEST_F(ExtraCopiesTest, WhereverAWriterDiesTheNextOneTakesOver) {
  enum class Old { none, without_extra_files, with_extra_files };
  int num_left_old = 0;
  const auto die_everywhere = [&](bool has_journal, Old old) {
    WorkOptions old_options = options(has_journal);
    if (old == Old::without_extra_files) old_options.extra_files.clear();
    bool has_failed = true;
    for (std::int64_t i = 0; has_failed; i += kSampleStep) {
      SCOPED_TRACE("operation " + std::to_string(i));
      ASSERT_LT(i, 200);
      if (old != Old::none) write(fs_, "old", old_options);
      faulty_.fail_operation(i, Fault::from_then_on);
      try {
        write(faulty_, "new", options(has_journal));
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io);
      }
      has_failed = faulty_.has_failed();
      if (old != Old::none && fs_.kind_of(tmp_ / "out.partial") &&
          files_of(tmp_ / "out") == expected("new")) {
        ++num_left_old;
        EXPECT_EQ(left_over_at(fs_, tmp_ / "out"), tmp_ / "out.partial");
      }
      write(fs_, "newer", options(has_journal));
      EXPECT_EQ(files_of(tmp_ / "out"), expected("newer"));
      EXPECT_EQ(names(), (Names{"out", "source"}));
      fs_.remove_all(tmp_ / "out");
    }
  };
  for (const bool has_journal : {false, true}) {
    for (const Old old : {Old::none, Old::without_extra_files, Old::with_extra_files}) {
      SCOPED_TRACE(::testing::Message() << has_journal << static_cast<int>(old));
      die_everywhere(has_journal, old);
    }
  }
  EXPECT_GT(num_left_old, 0);
}

TEST_F(ExtraCopiesTest, WhatSomebodyPutsIntoAReplacedCheckpointStays) {
  write(fs_, "old", options(false));
  for (std::int64_t i = 0; !left_over_at(fs_, tmp_ / "out"); ++i) {
    ASSERT_LT(i, 200);
    faulty_.fail_operation(i, Fault::from_then_on);
    try {
      write(faulty_, "new", options(false));
    } catch (const Error&) {
    }
  }
  write_file(tmp_ / "out.partial/mine", "mine");
  EXPECT_THAT([&] { write(fs_, "newer", options(false)); },
              ThrowsError(ErrorKind::already_exists, "out.partial/mine: staging: "));
  fs_.remove_all(tmp_ / "out.partial/mine");
  write_file(tmp_ / "out.partial/config.json", "mine");
  EXPECT_THAT([&] { write(fs_, "newer", options(false)); },
              ThrowsError(ErrorKind::already_exists, "out.partial/config.json: staging: "));
}

TEST_F(ExtraCopiesTest, AFileThatHasChangedIsRefusedAndLeavesNothing) {
  const WorkOptions work = options(false);
  write_file(tmp_ / "source/vocab.txt", "changed");
  EXPECT_THAT([&] { write(fs_, "new", work); },
              ThrowsError(ErrorKind::corruption, "vocab.txt: extra file: expected 3145728 bytes"));
  fs_.remove_all(tmp_ / "source/vocab.txt");
  EXPECT_THAT([&] { write(fs_, "new", work); },
              ThrowsError(ErrorKind::corruption, "found not there"));
  std::filesystem::create_symlink("config.json", tmp_ / "source/vocab.txt");
  EXPECT_THAT([&] { write(fs_, "new", work); }, ThrowsError(ErrorKind::corruption, "found a link"));
  EXPECT_EQ(names(), Names{"source"});
}

TEST_F(ExtraCopiesTest, AFileThatChangesAfterItWasCopiedIsRefusedAtTheEnd) {
  for (const bool has_journal : {false, true}) {
    WorkOptions work = options(has_journal);
    work.extra_files[0].text = "edited";
    {
      StagedWork staged(fs_, tmp_ / "out", DestinationKind::directory, work);
      write_file(tmp_ / "source/config.json", has_journal ? "{\"a\": 1}" : "{\"a\": 10}");
      EXPECT_THAT([&] { staged.commit(); },
                  ThrowsError(ErrorKind::corruption, "config.json: extra file: expected"));
    }
    EXPECT_EQ(names(), Names{"source"});
  }
}

TEST_F(ExtraCopiesTest, TextTakesThePlaceOfBytes) {
  WorkOptions work = options(false);
  work.extra_files[0].text = "edited";
  write(fs_, "new", work);
  EXPECT_EQ(read_all(tmp_ / "out/config.json"), "edited");
  EXPECT_TRUE(holds_copy(fs_, tmp_ / "out/config.json", work.extra_files[0]));
  work.extra_files[0].text = "Edited";
  EXPECT_FALSE(holds_copy(fs_, tmp_ / "out/config.json", work.extra_files[0]));
}

TEST_F(ExtraCopiesTest, ASingleFileTakesNone) {
  EXPECT_THAT([&] { StagedWork(fs_, tmp_ / "out", DestinationKind::file, options(false)); },
              ThrowsError(ErrorKind::invalid_argument, "a directory to copy them into"));
  EXPECT_EQ(names(), Names{"source"});
}

TEST_F(ExtraCopiesTest, WhatTheDestinationGetsMeanwhileStays) {
  for (const bool has_journal : {false, true}) {
    write(fs_, "old", options(has_journal));
    {
      StagedWork staged(fs_, tmp_ / "out", DestinationKind::directory, options(has_journal));
      write_file(tmp_ / "out/config.json", "mine");
      EXPECT_THAT([&] { staged.commit(); },
                  ThrowsError(ErrorKind::already_exists, "out/config.json: destination: "));
      write_file(tmp_ / "out/config.json", "{}");
      write_file(tmp_ / "out/mine", "mine");
      EXPECT_THAT([&] { staged.commit(); },
                  ThrowsError(ErrorKind::already_exists, "out/mine: destination: "));
    }
    EXPECT_EQ(read_all(tmp_ / "out/mine"), "mine");
    EXPECT_EQ(names(), (Names{"out", "source"}));
    fs_.remove_all(tmp_ / "out");
  }
}

TEST_F(ExtraCopiesTest, WhatSomebodyPutsIntoWorkStays) {
  for (const bool has_journal : {false, true}) {
    {
      StagedWork staged(fs_, tmp_ / "out", DestinationKind::directory, options(has_journal));
      write_file(tmp_ / "out.partial/mine", "mine");
    }
    EXPECT_EQ(files_of(tmp_ / "out.partial"),
              (std::map<std::string, std::string>{{"mine", "mine"}}));
    fs_.remove_all(tmp_ / "out.partial");
  }
}

TEST_F(ExtraCopiesTest, AResumedWriterCopiesAllAgain) {
  {
    StagedWork staged(fs_, tmp_ / "out", DestinationKind::directory, options(true));
    staged.journal()->note({{0, 0}, 0}, {.range = {0, 3}});
    ASSERT_TRUE(staged.keep());
  }
  write_file(tmp_ / "out.partial/config.json", "torn");
  fs_.remove_all(tmp_ / "out.partial/vocab.txt");
  const WorkOptions resume = options(true, KeptWork::resume);
  EXPECT_TRUE(StagedWork::check(fs_, tmp_ / "out", DestinationKind::directory, resume));
  fs_.make_directory(tmp_ / "out.partial/vocab.txt");  // not made by a writer
  EXPECT_THAT([&] { write(fs_, "new", resume); },
              ThrowsError(ErrorKind::already_exists, "out.partial/vocab.txt"));
  fs_.remove_all(tmp_ / "out.partial/vocab.txt");
  write(fs_, "new", resume);
  EXPECT_EQ(files_of(tmp_ / "out"), expected("new"));
  EXPECT_EQ(names(), (Names{"out", "source"}));
}

TEST_F(ExtraCopiesTest, WorkWithOtherExtraFilesIsNotResumed) {
  {
    StagedWork staged(fs_, tmp_ / "out", DestinationKind::directory, options(true));
    staged.journal()->note({{0, 0}, 0}, {.range = {0, 3}});
    ASSERT_TRUE(staged.keep());
  }
  write_file(tmp_ / "source/vocab.txt", "changed");
  EXPECT_THAT(
      [&] { write(fs_, "new", options(true, KeptWork::resume)); },
      ThrowsError(ErrorKind::mismatch,
                  "source or options have changed: extra file vocab.txt: expected 3145728"));
}

TEST_F(ExtraCopiesTest, AReplacedCheckpointMayHoldEqualFilesOnly) {
  write(fs_, "old", options(false));
  const auto check = [&] {
    check_destination(fs_, tmp_ / "elsewhere", tmp_ / "out", OverwritePolicy::replace, "replace",
                      extra_files());
  };
  check();
  EXPECT_THAT([&] { check_replaceable(fs_, tmp_ / "out", "replace"); },
              ThrowsError(ErrorKind::invalid_argument, "found 'config.json'"));
  write_file(tmp_ / "out/config.json", "{ }");
  EXPECT_THAT(check, ThrowsError(ErrorKind::invalid_argument, "out/config.json: replace: "));
  fs_.remove_all(tmp_ / "out/config.json");
  std::filesystem::create_symlink("../source/config.json", tmp_ / "out/config.json");
  EXPECT_THAT(check, ThrowsError(ErrorKind::invalid_argument, "out/config.json: replace: "));
  fs_.remove_all(tmp_ / "out/config.json");
  check();
  write_file(tmp_ / "out/mine", "");
  EXPECT_THAT(check, ThrowsError(ErrorKind::invalid_argument, "found 'mine'"));
}

}  // namespace
}  // namespace tessera::formats
