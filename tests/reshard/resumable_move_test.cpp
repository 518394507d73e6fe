#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "formats/native_checkpoint.h"
#include "formats/partly_read.h"
#include "formats/staging/journal.h"
#include "formats/staging/staged_destination.h"
#include "reshard/resume_identity.h"
#include "support/counting_reader.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"

// Moves that are interrupted, and resumed.

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::Format;
using formats::KeptWork;
using test::Bytes;
using test::CountingReader;
using test::FaultFileSystem;
using test::kSampleStep;
using test::MemoryCheckpoint;
using test::ThrowsError;
using Compression = formats::NativeWriteOptions::Compression;

struct Destination {
  std::string name;
  std::string file;
  formats::CreateOptions create{};
  int world_size = 0;

  friend std::ostream& operator<<(std::ostream& out, const Destination& destination) {
    return out << destination.name;
  }
};

std::vector<Destination> destinations() {
  return {
      {"native", "c", {.format = Format::native}, 2},
      {"native_zstd",
       "c",
       {.format = Format::native,
        .native = {.compression = Compression::zstd, .chunk_nbytes = 65536}}},
      {"safetensors_file", "c.safetensors", {.format = Format::safetensors}},
      {"safetensors_shards",
       "c",
       {.format = Format::safetensors, .safetensors = {.max_shard_nbytes = 200'000}}},
      {"dcp", "c", {.format = Format::dcp}, 2},
      {"torch_zip", "c.pt", {.format = Format::torch_zip}},
      {"deepspeed", "c", {.format = Format("deepspeed")}},
      {"rank_files", "c", {.format = Format("rank_files")}, 2},
  };
}

Destination destination(std::string_view name) {
  const auto all = destinations();
  return *std::ranges::find(all, name, &Destination::name);
}

/// Pieces that compress and pieces that do not, of one block and of several chunks, and values.
MemoryCheckpoint small_source() {
  test::Random random;
  MemoryCheckpoint source("small");
  source.add({"a", DType::float32, {3}}, test::bytes_of<float>({1, 2, 3}));
  source.add({"empty", DType::float32, {0, 4}}, {});
  source.add({"noise", DType::uint8, {150'000}}, test::random_bytes(150'000, random));
  source.add({"step", DType::int64, {}}, test::bytes_of<std::int64_t>({42}));
  source.add({"w", DType::bfloat16, {300, 500}}, test::weight_like_bytes(300'000, 2, random));
  source.add_value("epoch", Value(7));
  return source;
}

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kLargeNbytes = 18 * kMiB;

/// Returns repeated copies of the same noise, with another number in each page.
Bytes repeated(const Bytes& noise, std::uint64_t nbytes) {
  constexpr std::size_t kPageNbytes = 4096;
  Bytes bytes;
  while (bytes.size() < nbytes) bytes.insert(bytes.end(), noise.begin(), noise.end());
  for (std::size_t at = 0; at < bytes.size(); at += kPageNbytes) {
    const std::uint64_t number = at / kPageNbytes;
    std::memcpy(bytes.data() + at, &number, sizeof number);
  }
  return bytes;
}

/// Two tensors of several blocks in every format, large enough for files to bypass the page cache.
MemoryCheckpoint large_source() {
  test::Random random;
  MemoryCheckpoint source("large");
  constexpr std::int64_t kNumel = 6 * kMiB;
  source.add({"v", DType::uint8, {kNumel}}, repeated(test::random_bytes(kMiB, random), kNumel));
  source.add({"w", DType::bfloat16, {kNumel}},
             repeated(test::weight_like_bytes(kMiB, 2, random), 2 * kNumel));
  source.add_value("epoch", Value(7));
  return source;
}

class ResumableMoveTest : public ::testing::TestWithParam<Destination> {
 protected:
  std::string path() const { return tmp_ / GetParam().file; }
  std::string partial() const { return path() + ".partial"; }

  Plan planned(const CheckpointReader& source) const {
    return plan_reshard(source.contents(), source.path(),
                        {.format = GetParam().create.format,
                         .world_size = GetParam().world_size,
                         .cast = cast_,
                         .on_overflow = OnOverflow::infinity});
  }

  formats::CreateOptions create_options(KeptWork kept_work, OverwritePolicy overwrite) const {
    formats::CreateOptions create = GetParam().create;
    create.overwrite = overwrite;
    create.journal.emplace();
    create.journal->kept_work = kept_work;
    create.journal->identity["source"] = source_says_;
    for (const auto& [option, text] : plan_says_) {
      create.journal->identity[formats::kPlanExplanation + option] = text;
    }
    return create;
  }

  /// Moves `source`. If that fails, keeps the finished blocks and rethrows. Returns how many bytes
  /// an earlier run had already written.
  std::uint64_t move(const CheckpointReader& source, KeptWork kept_work,
                     OverwritePolicy overwrite = OverwritePolicy::refuse, int num_threads = 1) {
    const Plan plan = planned(source);
    EXPECT_TRUE(plan.problems.empty());
    const auto writer = start_move(plan, source, fs_, path(), create_options(kept_work, overwrite));
    std::atomic<std::uint64_t> resumed_nbytes = 0;
    overflows_.clear();
    try {
      finish_move(plan, source, *writer,
                  {.num_threads = num_threads,
                   .resumed = [&](std::uint64_t nbytes) { resumed_nbytes += nbytes; },
                   .overflowed = [&](const auto& each) { overflows_.push_back(each); }});
    } catch (const Error&) {
      writer->keep_work();
      throw;
    }
    return resumed_nbytes;
  }

  /// Moves `source` in place of another checkpoint. Calls `interfere` once, at the first progress.
  void replace_and_interfere(const CheckpointReader& source,
                             const std::function<void()>& interfere) {
    const Plan plan = planned(source);
    const auto writer = start_move(plan, source, fs_, path(),
                                   create_options(KeptWork::refuse, OverwritePolicy::replace));
    bool has_interfered = false;
    const auto once = [&](std::uint64_t) {
      if (!std::exchange(has_interfered, true)) interfere();
    };
    finish_or_keep(plan, source, *writer, fs_, path(), {.num_threads = 1, .progress = once});
  }

  std::function<void()> resuming(const CheckpointReader& source) {
    return [this, &source] { move(source, KeptWork::resume); };
  }

  /// Returns a function that makes the checks of a resumed move, but moves nothing.
  std::function<void()> checking(const CheckpointReader& source) {
    return [this, &source] {
      check_move(planned(source), source, fs_, path(),
                 create_options(KeptWork::resume, OverwritePolicy::refuse));
    };
  }

  /// Returns every file with its bytes, by its path below the temporary directory.
  std::map<std::string, std::string> all_files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(tmp_.path())) {
      const std::string file = entry.path().string();
      if (entry.is_regular_file()) files[file.substr(tmp_.path().size())] = test::read_all(file);
    }
    return files;
  }

  /// Returns the same without files of work in progress, whose paths have `.partial`.
  std::map<std::string, std::string> finished_files() const {
    auto files = all_files();
    std::erase_if(files, [](const auto& file) {
      return file.first.find(formats::StagedDestination::kSuffix) != std::string::npos;
    });
    return files;
  }

  void clear() {
    for (const auto& name : FileSystem::posix().list_directory(tmp_.path())) {
      FileSystem::posix().remove_all(tmp_ / name);
    }
  }

  /// Returns what an uninterrupted run without a journal leaves.
  std::map<std::string, std::string> whole(const CheckpointReader& source) {
    const Plan plan = planned(source);
    move_checkpoint(plan, source, fs_, path(), GetParam().create, {});
    auto files = all_files();
    clear();
    return files;
  }

  /// Moves `source`, and makes a read fail after about `nbytes` of the source.
  void move_and_interrupt(const CheckpointReader& source, std::uint64_t nbytes,
                          int num_threads = 1) {
    CountingReader failing(source);
    failing.fail_after(nbytes);
    EXPECT_THAT([&] { move(failing, KeptWork::refuse, OverwritePolicy::refuse, num_threads); },
                ThrowsError(ErrorKind::io, "pulled plug"));
    ASSERT_TRUE(FileSystem::posix().kind_of(partial()).has_value());
  }

  test::TemporaryDirectory tmp_;
  FaultFileSystem fs_{FileSystem::posix(), tmp_.path()};
  std::string source_says_ = "17 bytes";
  std::map<std::string, std::string> plan_says_;  // by option
  std::optional<DType> cast_;
  std::vector<TensorOverflow> overflows_;  // of the last move
};

std::string name_of(const ::testing::TestParamInfo<Destination>& tested) {
  return tested.param.name;
}

INSTANTIATE_TEST_SUITE_P(AllFormats, ResumableMoveTest, ::testing::ValuesIn(destinations()),
                         name_of);

// Shows E4.
TEST_P(ResumableMoveTest, AfterAFailureAtAnyOperationTheRestIsDone) {
  const MemoryCheckpoint source = small_source();
  const auto expected = whole(source);
  for (const auto fault : {FaultFileSystem::Fault::once, FaultFileSystem::Fault::from_then_on}) {
    std::int64_t index = 0;
    const std::int64_t step = fault == FaultFileSystem::Fault::once
                                  ? kSampleStep
                                  : std::max<std::int64_t>(3, kSampleStep);
    for (bool committed = false; !committed; index += step) {
      SCOPED_TRACE(index);
      fs_.fail_operation(index, fault);
      try {
        move(source, KeptWork::refuse);
        committed = !fs_.has_failed();  // failures after the commit are not reported
      } catch (const Error& error) {
        ASSERT_EQ(error.kind(), ErrorKind::io) << error.what();
        fs_.fail_operation(-1);
        const bool has_appeared = FileSystem::posix().kind_of(path()).has_value();
        if (!has_appeared) move(source, KeptWork::resume);
      }
      auto files = all_files();
      // If all later operations fail too, not even the journal can be removed.
      files.erase("/" + GetParam().file + ".partial.journal");
      ASSERT_TRUE(files == expected);
      clear();
    }
    EXPECT_GT(index, 15);
  }
}

// Shows E4.
TEST_P(ResumableMoveTest, AFailedReplacementLeavesTheOldOneAndGoesOn) {
  const MemoryCheckpoint source = small_source();
  MemoryCheckpoint old_source("old");
  old_source.add({"old", DType::float32, {2}}, test::bytes_of<float>({5, 6}));
  old_source.add_value("epoch", Value(1));
  const auto expected = whole(source);
  const auto old_files = whole(old_source);
  const std::string exchange =
      "exchange " + GetParam().file + ".partial " + GetParam().file + " FAILED\n";
  bool has_failed = true;
  int num_exchanges = 0;
  for (std::int64_t index = 0; has_failed; index += kSampleStep) {
    SCOPED_TRACE(index);
    fs_.fail_operation(-1);
    move(old_source, KeptWork::refuse);
    fs_.fail_operation(index);
    try {
      move(source, KeptWork::refuse, OverwritePolicy::replace);
      has_failed = fs_.has_failed();
      ASSERT_TRUE(finished_files() == expected);
    } catch (const Error&) {
      const bool is_exchange = fs_.transcript().find(exchange) != std::string::npos;
      fs_.fail_operation(-1);
      ASSERT_TRUE(finished_files() == old_files);
      const std::uint64_t kept_nbytes = move(source, KeptWork::resume, OverwritePolicy::replace);
      if (is_exchange) {
        EXPECT_GT(kept_nbytes, 0U);
        ++num_exchanges;
      }
      ASSERT_TRUE(all_files() == expected);
    }
    clear();
  }
  if (kSampleStep == 1) {
    EXPECT_EQ(num_exchanges, 1);
  }
}

// Shows E4.
TEST_P(ResumableMoveTest, WhatWasReplacedIsNotTakenForKeptWork) {
  constexpr std::int64_t kNumLast = 8;
  const MemoryCheckpoint source = small_source();
  const auto expected = whole(source);
  const auto replace = [&] { move(source, KeptWork::refuse, OverwritePolicy::replace); };
  replace();
  fs_.fail_operation(-1);
  replace();
  const std::int64_t num_operations = fs_.num_operations();
  int num_left = 0;
  for (std::int64_t index = num_operations - kNumLast; index < num_operations; ++index) {
    fs_.fail_operation(index, FaultFileSystem::Fault::from_then_on);
    try {
      replace();  // failures after the commit are not reported
      if (FileSystem::posix().kind_of(partial())) ++num_left;
    } catch (const Error&) {
      clear();
    }
    fs_.fail_operation(-1);
    replace();
    EXPECT_TRUE(all_files() == expected);
  }
  EXPECT_GT(num_left, 0);
}

// Shows E4.
TEST_P(ResumableMoveTest, WhatSomebodyHasPutIntoWorkThatIsNotKeptStaysAndIsTold) {
  const MemoryCheckpoint source = small_source();
  CountingReader failing(source);
  failing.fail_after(200'000, ErrorKind::corruption);
  const Plan plan = planned(source);
  auto writer = start_move(plan, source, fs_, path(),
                           create_options(KeptWork::refuse, OverwritePolicy::refuse));
  const bool is_directory = FileSystem::posix().kind_of(partial()) == FileKind::directory;
  if (is_directory) std::ofstream(partial() + "/notes.txt") << "mine";
  try {
    finish_or_keep(plan, failing, *writer, fs_, path(), {.num_threads = 1});
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string stays = "\n  not removed: " + partial() + "/notes.txt, which Tessera did not";
    EXPECT_EQ(std::string(error.what()).find(stays) != std::string::npos, is_directory)
        << error.what();
    EXPECT_EQ(error.kind(), ErrorKind::corruption);
  }
  writer.reset();
  EXPECT_EQ(FileSystem::posix().list_directory(tmp_.path()).size(), is_directory ? 1U : 0U);
  if (!is_directory) return;
  EXPECT_EQ(FileSystem::posix().list_directory(partial()), std::vector<std::string>{"notes.txt"});
}

// Shows E4.
TEST_P(ResumableMoveTest, WhatChangesInTheOldCheckpointMeanwhileStaysAndTheWorkIsKept) {
  const MemoryCheckpoint source = small_source();
  MemoryCheckpoint old_source("old");
  old_source.add({"old", DType::float32, {2}}, test::bytes_of<float>({5, 6}));
  old_source.add_value("epoch", Value(1));
  const auto expected = whole(source);
  const auto old_files = whole(old_source);
  for (const auto& [file, bytes] : old_files) {
    SCOPED_TRACE(file);
    move(old_source, KeptWork::refuse);
    const auto change = [&] { test::write_file(tmp_.path() + file, bytes); };
    EXPECT_THAT([&] { replace_and_interfere(source, change); },
                ThrowsError(ErrorKind::already_exists, tmp_.path() + file + ": destination: "));
    EXPECT_TRUE(finished_files() == old_files);
    EXPECT_GT(move(source, KeptWork::resume, OverwritePolicy::replace), 0U);
    EXPECT_TRUE(all_files() == expected);
    clear();
  }
}

// Shows E4.
TEST_P(ResumableMoveTest, FinishedBlocksAreNotReadFromTheSourceAgain) {
  const MemoryCheckpoint source = large_source();
  const auto expected = whole(source);
  for (const int num_threads : {1, 3}) {
    move_and_interrupt(source, kLargeNbytes * 2 / 3, num_threads);
    CountingReader reader(source);
    const std::uint64_t resumed_nbytes =
        move(reader, KeptWork::resume, OverwritePolicy::refuse, num_threads);
    // With several threads, only one block is certainly finished when a read fails.
    EXPECT_GE(resumed_nbytes, num_threads == 1 ? kLargeNbytes / 3 : 1U);
    EXPECT_EQ(reader.nbytes_read(), kLargeNbytes - resumed_nbytes);
    EXPECT_TRUE(all_files() == expected);
    clear();
  }
}

TEST_P(ResumableMoveTest, ASourceThatIsOverwrittenMeanwhileGivesNothing) {
  const MemoryCheckpoint memory = large_source();
  CountingReader source(memory);
  const std::string file = tmp_ / "source";
  std::ofstream(file) << "old";
  source.set_data_files({file});
  const auto opened = source_file_states(source);
  const Plan plan = planned(source);
  const auto moving = [&](ExecuteOptions options) {
    return [&, options] { move_checkpoint(plan, source, fs_, path(), GetParam().create, options); };
  };
  const auto refuses = ThrowsError(ErrorKind::mismatch, "source: source file: expected");
  const auto overwrite = [&](std::uint64_t) { std::ofstream(file) << "newer"; };
  EXPECT_THAT(moving({.progress = overwrite}), refuses);
  EXPECT_THAT(moving({.source_files = opened}), refuses);  // before the move began
  EXPECT_FALSE(FileSystem::posix().kind_of(path()).has_value());
  EXPECT_NO_THROW(moving({})());
}

TEST_P(ResumableMoveTest, NumbersTooLargeForACastAreCountedInFinishedBlocksToo) {
  MemoryCheckpoint source("large");
  constexpr std::int64_t kNumel = 6 * kMiB;
  std::vector<float> numbers(kNumel, 1.0F);
  numbers.front() = 1e6F;
  numbers.back() = -1e9F;
  source.add({"w", DType::float32, {kNumel}}, test::bytes_of<float>(numbers));
  cast_ = DType::float16;
  const auto expected = whole(source);
  move_and_interrupt(source, 4 * kNumel * 2 / 3);
  EXPECT_GT(move(source, KeptWork::resume), 0U);
  ASSERT_EQ(overflows_.size(), 1U);
  EXPECT_EQ(overflows_[0].num_elements, 2);
  EXPECT_EQ(overflows_[0].largest_magnitude, 1e9);
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4.
TEST(ResumeIdentityTest, EveryFileOfTheSourceCountsAlsoOfOneName) {
  test::TemporaryDirectory tmp;
  const std::vector<std::string> files = {tmp / "a/rank.h5", tmp / "b/rank.h5", tmp / "c.h5"};
  for (const char* name : {"a", "b"}) std::filesystem::create_directory(tmp / name);
  for (const std::string& file : files) test::write_file(file, "12345");
  const MemoryCheckpoint source = small_source();
  CountingReader reader(source);
  reader.set_data_files(files);
  const Plan plan = plan_reshard(source.contents(), source.path(), {});
  const auto identity = [&] { return resume_identity(plan, reader, {Value(7)}, {}); };
  const auto before = identity();
  EXPECT_EQ(identity(), before);
  for (const std::string& file : files) {
    const auto time = std::filesystem::last_write_time(file);
    test::write_file(file, "1234");
    std::filesystem::last_write_time(file, time);
    EXPECT_NE(identity(), before) << file;
    test::write_file(file, "12345");
    std::filesystem::last_write_time(file, time + std::chrono::nanoseconds(1000));
    EXPECT_NE(identity(), before) << file;
    std::filesystem::last_write_time(file, time);
    EXPECT_EQ(identity(), before) << file;
  }
  EXPECT_NE(resume_identity(plan, reader, {Value(8)}, {}), before);
  EXPECT_NE(resume_identity(plan, reader, {Value(7)}, {.format = Format::dcp}), before);
  const Plan other = plan_reshard(source.contents(), source.path(), {.world_size = 2});
  EXPECT_NE(resume_identity(other, reader, {Value(7)}, {}), before);
}

// Not for compressed chunks: a resumed run may write them to other offsets.
class PlainResumableMoveTest : public ResumableMoveTest {};
INSTANTIATE_TEST_SUITE_P(Native, PlainResumableMoveTest, ::testing::Values(destination("native")),
                         name_of);

// Shows E4.
TEST_P(PlainResumableMoveTest, ABlockOfAnotherTensorIsNotTakenWhateverTheJournalSays) {
  test::Random random;
  MemoryCheckpoint source("twins");
  constexpr std::int64_t kNumel = 8 * kMiB;
  for (const char* name : {"a", "b"}) {
    source.add({name, DType::uint8, {kNumel}}, test::random_bytes(kNumel, random));
  }
  const auto expected = whole(source);
  move_and_interrupt(source, 15 * kMiB);
  const std::string path = partial() + ".journal";
  const auto kept = formats::read_journal(FileSystem::posix(), path);
  ASSERT_TRUE(kept.has_value());
  FileSystem::posix().remove_all(path);
  {
    formats::Journal forged(FileSystem::posix(), path, kept->identity);
    for (const auto& [id, block] : kept->entries) {
      auto other = id;
      other.tensor_index = 1 - id.tensor_index;
      forged.note(other, block);
    }
  }
  EXPECT_EQ(move(source, KeptWork::resume), 0U);
  EXPECT_EQ(finished_files(), expected);
}

// Shows E4.
TEST_P(ResumableMoveTest, NothingIsWrittenThroughALink) {
  const MemoryCheckpoint source = large_source();
  const std::string victim = tmp_ / "victim";
  for (const bool is_hard : {false, true}) {
    move_and_interrupt(source, kLargeNbytes - 2 * kMiB);
    test::write_file(victim, "somebody's");
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(tmp_.path())) {
      if (entry.is_regular_file() && entry.path() != victim) files.push_back(entry.path());
    }
    for (const std::string& file : files) {
      if (file.ends_with(".journal")) continue;
      std::filesystem::remove(file);
      if (is_hard) {
        std::filesystem::create_hard_link(victim, file);
      } else {
        std::filesystem::create_symlink(victim, file);
      }
    }
    try {
      move(source, KeptWork::resume);
    } catch (const Error&) {
      // The move may also refuse the kept work.
    }
    EXPECT_EQ(test::read_all(victim), "somebody's");
    clear();
  }
}

class CompressedResumableMoveTest : public ResumableMoveTest {};
INSTANTIATE_TEST_SUITE_P(Native, CompressedResumableMoveTest,
                         ::testing::Values(destination("native_zstd")), name_of);

// Shows E4.
TEST_P(CompressedResumableMoveTest, SpaceThatIsReservedStepByStepIsNotGivenBack) {
  constexpr std::int64_t kNbytes = 120 * kMiB;  // more than one step, when compressed
  constexpr std::uint64_t kMovedNbytes = 110 * kMiB;
  test::Random random;
  MemoryCheckpoint source("large");
  source.add({"w", DType::bfloat16, {kNbytes / 2}},
             repeated(test::weight_like_bytes(kMiB, 2, random), kNbytes));
  const auto expected = whole(source);
  move_and_interrupt(source, kMovedNbytes);
  EXPECT_EQ(move(source, KeptWork::resume), kMovedNbytes);
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4.
TEST_P(ResumableMoveTest, ARunThatGoesOnMayFailToo) {
  const MemoryCheckpoint source = large_source();
  const auto expected = whole(source);
  move_and_interrupt(source, kLargeNbytes / 2);
  for (int round = 0;; ++round) {
    ASSERT_LT(round, 10);
    CountingReader reader(source);
    reader.fail_after(kLargeNbytes / 2);
    try {
      EXPECT_GT(move(reader, KeptWork::resume), 0U);
      break;
    } catch (const Error&) {
      EXPECT_GT(reader.nbytes_read(), 0U);
    }
  }
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4.
TEST_P(ResumableMoveTest, WhatIsNotAsTheJournalSaysIsWrittenAgain) {
  const MemoryCheckpoint source = large_source();
  const auto expected = whole(source);
  move_and_interrupt(source, kLargeNbytes - 2 * kMiB);
  // Damages a byte of each finished block. Files of all ranks have the same layout.
  const auto journal = formats::read_journal(FileSystem::posix(), partial() + ".journal");
  ASSERT_TRUE(journal.has_value());
  for (const auto& entry : std::filesystem::recursive_directory_iterator(tmp_.path())) {
    const std::string file = entry.path().string();
    if (!entry.is_regular_file() || file.ends_with(".journal")) continue;
    std::set<std::uint64_t> places;
    for (const auto& [id, block] : journal->entries) {
      places.insert(block.range.begin + block.range.nbytes() / 2);
    }
    std::fstream stream(file, std::ios::binary | std::ios::in | std::ios::out);
    for (const std::uint64_t place : places) {
      if (place >= entry.file_size()) continue;
      const auto at = static_cast<std::streamoff>(place);
      stream.seekg(at);
      const auto byte = static_cast<char>(stream.get() ^ 1);
      stream.seekp(at);
      stream.put(byte);
    }
  }
  CountingReader reader(source);
  EXPECT_EQ(move(reader, KeptWork::resume), 0U);
  EXPECT_EQ(reader.nbytes_read(), kLargeNbytes);
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4.
TEST_P(ResumableMoveTest, OtherWorkIsRefusedAndStays) {
  const MemoryCheckpoint source = large_source();
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  const auto before = all_files();
  EXPECT_THAT([&] { move(source, KeptWork::refuse); },
              ThrowsError(ErrorKind::already_exists, "kept here"));
  source_says_ = "18 bytes";
  EXPECT_THAT([&] { move(source, KeptWork::resume); },
              ThrowsError(ErrorKind::mismatch, "expected 17 bytes, found 18 bytes"));
  source_says_ = "17 bytes";
  EXPECT_THAT(
      [&] { move(small_source(), KeptWork::resume); },
      ThrowsError(ErrorKind::mismatch, "plan, source: expected 2 tensors of 18874368 bytes"));
  EXPECT_TRUE(all_files() == before);
}

/// Returns a checkpoint of the same size as a large source, under other names.
MemoryCheckpoint with_other_names(const MemoryCheckpoint& source) {
  MemoryCheckpoint renamed("renamed");
  for (const char* name : {"v", "x"}) {
    const auto& tensor = source.contents().tensors[name[0] == 'v' ? 0 : 1];
    renamed.add({name, tensor.meta.dtype, tensor.meta.shape}, Bytes(tensor.meta.nbytes()));
  }
  renamed.add_value("epoch", Value(7));
  return renamed;
}

// Shows E4.
TEST_P(ResumableMoveTest, AnotherPlanIsToldByWhatItIsMadeOf) {
  const MemoryCheckpoint source = large_source();
  plan_says_ = {{"cast", "none"}, {"only", "v"}};
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  const MemoryCheckpoint renamed = with_other_names(source);
  const auto resume = [&](const CheckpointReader& reader) { move(reader, KeptWork::resume); };
  EXPECT_THAT([&] { resume(renamed); },
              ThrowsError(ErrorKind::mismatch, "source or options have changed: plan: expected"));
  plan_says_["only"] = "[v]";
  EXPECT_THAT([&] { resume(renamed); },
              ThrowsError(ErrorKind::mismatch, "have changed: plan, only: expected v, found [v]"));
  EXPECT_NO_THROW(resume(source));  // the options in other words, but the same plan
}

// Shows E4.
TEST_P(ResumableMoveTest, AnOlderJournalNamesOptionsAsACommandLineDoes) {
  const MemoryCheckpoint source = large_source();
  plan_says_ = {{"--cast", "none"}, {"--only", "v"}};
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  const MemoryCheckpoint renamed = with_other_names(source);
  plan_says_ = {{"cast", "none"}, {"only", "[v]"}};
  EXPECT_THAT([&] { move(renamed, KeptWork::resume); },
              ThrowsError(ErrorKind::mismatch, "have changed: plan, only: expected v, found [v]"));
  EXPECT_NO_THROW(move(source, KeptWork::resume));
}

class DirectoryResumableMoveTest : public ResumableMoveTest {};
INSTANTIATE_TEST_SUITE_P(Directories, DirectoryResumableMoveTest,
                         ::testing::Values(destination("native"), destination("native_zstd"),
                                           destination("safetensors_shards"), destination("dcp")),
                         name_of);

// Shows E4.
TEST_P(DirectoryResumableMoveTest, WhatTheWriterDoesNotWriteIsNotMadePartOfTheCheckpoint) {
  const MemoryCheckpoint source = large_source();
  const auto expected = whole(source);
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  for (const char* name : {"notes.json", "rank-00099.h5", "__9_0.distcp", "a.safetensors"}) {
    test::write_file(partial() + "/" + name, "somebody's");
    for (const auto& refused : {checking(source), resuming(source)}) {
      EXPECT_THAT(refused, ThrowsError(ErrorKind::already_exists,
                                       GetParam().file + ".partial/" + name + ": kept work"));
    }
    EXPECT_EQ(test::read_all(partial() + "/" + name), "somebody's");
    std::filesystem::remove(partial() + "/" + name);
  }
  EXPECT_GT(move(source, KeptWork::resume), 0U);
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4.
TEST_P(DirectoryResumableMoveTest, WhatSomebodyPutsIntoTheWorkMeanwhileStaysAndTheWorkIsKept) {
  const MemoryCheckpoint source = small_source();
  const auto expected = whole(source);
  for (const std::string name : {"notes.json", "rank-00099.h5", "__9_0.distcp", "a.safetensors"}) {
    SCOPED_TRACE(name);
    const std::string file = partial() + "/" + name;
    EXPECT_THAT(
        [&] { replace_and_interfere(source, [&] { test::write_file(file, "somebody's"); }); },
        ThrowsError(ErrorKind::already_exists, file + ": staging: "));
    EXPECT_EQ(test::read_all(file), "somebody's");
    EXPECT_TRUE(finished_files().empty());
    std::filesystem::remove(file);
    EXPECT_GT(move(source, KeptWork::resume), 0U);
    EXPECT_TRUE(all_files() == expected);
    clear();
  }
}

// Shows E4.
TEST_P(DirectoryResumableMoveTest, WhatSomebodyHasPutIntoWorkStaysIfNoWorkIsKept) {
  const MemoryCheckpoint source = small_source();
  const Plan plan = planned(source);
  for (const std::string name : {"notes.json", "rank-00099.h5", "__9_0.distcp"}) {
    SCOPED_TRACE(name);
    const auto put = [&](std::uint64_t) { test::write_file(partial() + "/" + name, "somebody's"); };
    EXPECT_THAT(
        [&] { move_checkpoint(plan, source, fs_, path(), GetParam().create, {.progress = put}); },
        ThrowsError(ErrorKind::already_exists, name + ": staging: "));
    EXPECT_EQ(FileSystem::posix().list_directory(partial()), std::vector<std::string>{name});
    clear();
  }
}

/// Returns the path of the first file in a directory. If the directory has only folders, returns
/// the first file in them.
std::string first_file_in(const std::string& directory) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  return std::ranges::min(files);
}

// Shows E4.
TEST_P(ResumableMoveTest, WhatCannotBeGoneOnWithIsRefusedAtOnceAndSoByACheck) {
  const MemoryCheckpoint source = large_source();
  const auto expected = whole(source);
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  const auto expect_refused = [&](const std::string& path, const std::string& found) {
    for (const auto& refused : {checking(source), resuming(source)}) {
      EXPECT_THAT(
          refused,
          ThrowsError(ErrorKind::already_exists,
                      path +
                          ": file to write: expected a regular file with only this name, found " +
                          found + " (remove or rename it)"));
    }
  };
  const bool is_directory = std::filesystem::is_directory(partial());
  const std::string file = is_directory ? first_file_in(partial()) : partial();
  for (const std::string& path : {file, partial() + ".journal"}) {
    std::filesystem::create_hard_link(path, tmp_ / "other");
    expect_refused(path, "a file with a second name (a hard link)");
    std::filesystem::remove(tmp_ / "other");
  }
  if (is_directory) {
    std::filesystem::rename(file, tmp_ / "other");
    std::filesystem::create_symlink("nowhere", file);
    expect_refused(file, "a link");
    std::filesystem::remove(file);
    std::filesystem::create_directory(file);
    expect_refused(file, "another kind of object");
    std::filesystem::remove(file);
    std::filesystem::rename(tmp_ / "other", file);
  }
  EXPECT_GT(move(source, KeptWork::resume), 0U);
  EXPECT_TRUE(all_files() == expected);
}

/// A source whose storages turn out to be damaged after the last read.
class DamagedSource final : public CountingReader, public formats::PartlyRead {
 public:
  using CountingReader::CountingReader;
  void check_rest(const formats::RestOptions& /*options*/) const override {
    throw Error(ErrorKind::corruption, {}, "damaged storage");
  }
};

TEST_P(ResumableMoveTest, WorkIsNotKeptIfItsSourceIsDamaged) {
  const MemoryCheckpoint source = large_source();
  const DamagedSource damaged(source);
  const Plan plan = planned(damaged);
  for (const bool is_resumed : {false, true}) {
    if (is_resumed) move_and_interrupt(source, kLargeNbytes * 2 / 3);
    auto writer = start_move(
        plan, damaged, fs_, path(),
        create_options(is_resumed ? KeptWork::resume : KeptWork::refuse, OverwritePolicy::refuse));
    EXPECT_THAT([&] { finish_or_keep(plan, damaged, *writer, fs_, path(), {.num_threads = 1}); },
                ThrowsError(ErrorKind::corruption, "damaged storage"));
    writer.reset();
    EXPECT_THAT(FileSystem::posix().list_directory(tmp_.path()), testing::IsEmpty());
  }
}

TEST_P(ResumableMoveTest, DamagedWorkStaysIfItHoldsAFileOfAnotherProgram) {
  const MemoryCheckpoint source = large_source();
  const DamagedSource damaged(source);
  const Plan plan = planned(damaged);
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  if (!std::filesystem::is_directory(partial())) return;  // a single file holds no others
  auto writer = start_move(plan, damaged, fs_, path(),
                           create_options(KeptWork::resume, OverwritePolicy::refuse));
  const std::string notes = partial() + "/notes.txt";
  test::write_file(notes, "mine");
  EXPECT_THAT([&] { finish_or_keep(plan, damaged, *writer, fs_, path(), {.num_threads = 1}); },
              ThrowsError(ErrorKind::corruption, "not removed: " + notes));
  writer.reset();
  EXPECT_EQ(test::read_all(notes), "mine");
}

TEST_P(ResumableMoveTest, WorkOfALivingWriterIsNotCalledInterrupted) {
  const MemoryCheckpoint source = large_source();
  const auto open = [&] { formats::open_checkpoint(fs_, partial()); };
  const Plan plan = planned(source);
  auto writer = start_move(plan, source, fs_, path(),
                           create_options(KeptWork::refuse, OverwritePolicy::refuse));
  EXPECT_THAT(open, ThrowsError(ErrorKind::corruption, "is writing it (wait until it ends)"));
  std::filesystem::create_symlink(partial(), tmp_ / "link");
  EXPECT_THAT([&] { formats::open_checkpoint(fs_, tmp_ / "link"); },
              ThrowsError(ErrorKind::corruption, "is writing it (wait until it ends)"));
  writer.reset();
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  EXPECT_THAT(open, ThrowsError(ErrorKind::corruption, "run was interrupted here"));
}

// Shows E4.
TEST_P(ResumableMoveTest, ANameWithoutRoomForThatOfTheWorkIsRefusedAtOnce) {
  const MemoryCheckpoint source = small_source();
  const Plan plan = planned(source);
  const std::size_t room_nbytes = GetParam().name == "safetensors_file" ? 235 : 239;
  const auto path_of = [&](std::size_t nbytes) {
    return tmp_ / (std::string(nbytes - GetParam().file.size(), 'n') + GetParam().file);
  };
  const auto create = create_options(KeptWork::refuse, OverwritePolicy::refuse);
  const auto too_long =
      ThrowsError(ErrorKind::invalid_argument, "is added to it while the checkpoint is written");
  EXPECT_THAT([&] { check_move(plan, source, fs_, path_of(room_nbytes + 1), create); }, too_long);
  EXPECT_THAT([&] { start_move(plan, source, fs_, path_of(room_nbytes + 1), create); }, too_long);
  EXPECT_TRUE(std::filesystem::is_empty(tmp_.path()));
  check_move(plan, source, fs_, path_of(room_nbytes), create);
  finish_move(plan, source, *start_move(plan, source, fs_, path_of(room_nbytes), create), {});
  EXPECT_TRUE(FileSystem::posix().kind_of(path_of(room_nbytes)).has_value());
}

// Shows E4.
TEST_P(ResumableMoveTest, WhatNoWriterLeftStaysWhateverItLooksLike) {
  const MemoryCheckpoint source = small_source();
  const auto expect_refused = [&] {
    const auto before = all_files();
    for (const auto overwrite : {OverwritePolicy::refuse, OverwritePolicy::replace}) {
      for (const KeptWork kept_work : {KeptWork::refuse, KeptWork::resume, KeptWork::discard}) {
        EXPECT_THAT([&] { move(source, kept_work, overwrite); },
                    ThrowsError(ErrorKind::already_exists, "expected an unused name"));
      }
    }
    EXPECT_TRUE(all_files() == before);
  };
  for (const std::string& text : {std::string("a thesis"), std::string(9000, '\0')}) {
    test::write_file(partial(), text);
    expect_refused();
  }
  clear();
  move(source, KeptWork::refuse);
  std::filesystem::rename(path(), partial());
  expect_refused();
}

// Shows E4.
TEST_P(ResumableMoveTest, WhatAWriterLeftIsTakenOverWhateverItLooksLike) {
  const MemoryCheckpoint source = small_source();
  const auto expected = whole(source);
  for (const std::string journal : {"", "tessera-", "tessera-journal 1\n"}) {
    move(source, KeptWork::refuse);  // a complete checkpoint, like one that was replaced
    std::filesystem::rename(path(), partial());
    test::write_file(partial() + ".journal", journal);
    FileSystem::posix().remove_all(path() + ".values.json");  // beside a single file
    move(source, KeptWork::resume);
    EXPECT_TRUE(all_files() == expected);
    clear();
  }
}

// Shows E4.
TEST_P(ResumableMoveTest, KeptWorkOfAnotherFormatIsToldAndDiscarded) {
  const MemoryCheckpoint source = small_source();
  const auto expected = whole(source);
  const bool is_file = expected.contains("/" + GetParam().file);
  if (is_file) {
    std::filesystem::create_directory(partial());
    test::write_file(partial() + "/rank-00000.h5", "half");
  } else {
    test::write_file(partial(), "half");
  }
  {
    formats::Journal journal(FileSystem::posix(), partial() + ".journal",
                             formats::ResumeIdentity{{"destination", "another format"}});
    journal.note({{0, 0}, 0}, {.range = {0, 4}});
  }
  const auto before = all_files();
  EXPECT_THAT([&] { move(source, KeptWork::refuse); },
              ThrowsError(ErrorKind::already_exists, std::string("left its work here: ") +
                                                         (is_file ? "a directory" : "a file")));
  EXPECT_THAT([&] { move(source, KeptWork::resume); },
              ThrowsError(ErrorKind::mismatch, "destination: expected another format, found"));
  EXPECT_TRUE(all_files() == before);
  move(source, KeptWork::discard);
  EXPECT_TRUE(all_files() == expected);
}

/// Returns what the function throws; empty if it throws nothing.
std::string refusal_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// Shows E4.
TEST_P(ResumableMoveTest, ACheckRefusesWhatTheDestinationCannotHold) {
  Value deep = 1;
  for (int i = 0; i < 2000; ++i) {
    Value::List outer;
    outer.push_back(std::move(deep));
    deep = std::move(outer);
  }
  const Value a_set = Value::Set{{1}};
  const std::map<std::string, Value> values{
      {"deep", deep},
      {"key", Value::Dict{{a_set, 1}}},
      {"set", Value::Set{{a_set}}},
      {"symbol", Value::Symbol{"torch.no_such_thing"}},
      {"text", std::string("\xff")},
  };
  for (const auto& [name, value] : values) {
    SCOPED_TRACE(name);
    MemoryCheckpoint source;
    source.add({"w", DType::float32, {1}}, test::Bytes(4));
    source.add_value("a." + name, value);
    const Plan plan = planned(source);
    const auto create = create_options(KeptWork::refuse, OverwritePolicy::refuse);
    const std::string checked = refusal_of([&] { check_move(plan, source, fs_, path(), create); });
    EXPECT_TRUE(std::filesystem::is_empty(tmp_.path()));
    const std::string moved = refusal_of(
        [&] { finish_move(plan, source, *start_move(plan, source, fs_, path(), create), {}); });
    EXPECT_EQ(checked, moved);
    EXPECT_TRUE(moved.empty() || moved.find("a." + name) != std::string::npos) << moved;
    fs_.remove_all(path());
    for (const auto& left : std::filesystem::directory_iterator(tmp_.path())) {
      std::filesystem::remove_all(left.path());
    }
  }
}

// Shows E4.
TEST_P(ResumableMoveTest, ACheckTellsWhatAMoveWouldRefuse) {
  const MemoryCheckpoint source = large_source();
  const auto check = [&](KeptWork kept_work) {
    const Plan plan = planned(source);
    return [this, plan, &source, kept_work] {
      check_move(plan, source, fs_, path(), create_options(kept_work, OverwritePolicy::refuse));
    };
  };
  EXPECT_NO_THROW(check(KeptWork::refuse)());
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  const auto before = all_files();
  EXPECT_THAT(check(KeptWork::refuse), ThrowsError(ErrorKind::already_exists, "kept here"));
  EXPECT_NO_THROW(check(KeptWork::resume)());
  EXPECT_NO_THROW(check(KeptWork::discard)());
  source_says_ = "18 bytes";
  EXPECT_THAT(check(KeptWork::resume),
              ThrowsError(ErrorKind::mismatch, "expected 17 bytes, found 18 bytes"));
  EXPECT_TRUE(all_files() == before);
}

class ValuesBesideTest : public ResumableMoveTest {};
INSTANTIATE_TEST_SUITE_P(Safetensors, ValuesBesideTest,
                         ::testing::Values(destination("safetensors_file")), name_of);

// Shows E4.
TEST_P(ValuesBesideTest, ValuesThatHaveAppearedAlreadyDoNoHarm) {
  const std::string values = "/" + GetParam().file + ".values.json";
  const MemoryCheckpoint source = large_source();
  const auto expected = whole(source);
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  test::write_file(tmp_.path() + values, "somebody's");
  EXPECT_THAT([&] { move(source, KeptWork::resume); },
              ThrowsError(ErrorKind::already_exists, "but another file has it"));
  test::write_file(tmp_.path() + values, expected.at(values));
  EXPECT_GT(move(source, KeptWork::resume), 0U);
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4.
TEST_P(ValuesBesideTest, OldValuesThatChangeMeanwhileStay) {
  const std::string values = path() + ".values.json";
  MemoryCheckpoint source("without values");
  source.add({"a", DType::float32, {2}}, test::bytes_of<float>({5, 6}));
  move(small_source(), KeptWork::refuse);
  const auto change = [&] { test::write_file(values, "somebody's"); };
  EXPECT_THAT([&] { replace_and_interfere(source, change); },
              ThrowsError(ErrorKind::already_exists, values + ": destination: "));
  EXPECT_EQ(test::read_all(values), "somebody's");
}

// Shows E4.
TEST_P(ValuesBesideTest, OldValuesThatCannotBeRemovedAreToldAndNoFailure) {
  const std::string file = GetParam().file;
  const std::string removal = "remove_all " + file + ".values.json FAILED\n";
  const MemoryCheckpoint old_source = small_source();
  MemoryCheckpoint source("without values");
  source.add({"a", DType::float32, {2}}, test::bytes_of<float>({5, 6}));
  const auto expected = whole(source);
  bool was_left = false;
  for (std::int64_t index = 0; !was_left; ++index) {
    ASSERT_LT(index, 100);
    fs_.fail_operation(-1);
    move(old_source, KeptWork::refuse);
    EXPECT_EQ(formats::left_over_at(fs_, path()), std::nullopt);
    fs_.fail_operation(index);
    try {
      move(source, KeptWork::refuse, OverwritePolicy::replace);
      was_left = fs_.transcript().find(removal) != std::string::npos;
    } catch (const Error&) {
      ASSERT_EQ(fs_.transcript().find(removal), std::string::npos);
    }
    if (!was_left) clear();
  }
  fs_.fail_operation(-1);
  EXPECT_EQ(formats::left_over_at(fs_, path()), path() + ".values.json");
  std::filesystem::remove(path() + ".values.json");
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4.
TEST_P(ResumableMoveTest, DiscardedWorkIsGone) {
  const MemoryCheckpoint source = large_source();
  move_and_interrupt(source, kLargeNbytes * 2 / 3);
  source_says_ = "18 bytes";
  const MemoryCheckpoint other = small_source();
  EXPECT_EQ(move(other, KeptWork::discard), 0U);
  const auto files = all_files();
  clear();
  EXPECT_TRUE(files == whole(other));
}

// Shows E4.
TEST_P(ResumableMoveTest, AWriterWithoutAJournalLeavesKeptWorkAlone) {
  move_and_interrupt(large_source(), kLargeNbytes * 2 / 3);
  const auto before = all_files();
  EXPECT_TRUE(before.contains("/" + GetParam().file + ".partial.journal"));
  const MemoryCheckpoint source = small_source();
  const Plan plan = planned(source);
  formats::CreateOptions create = GetParam().create;
  for (const auto overwrite : {OverwritePolicy::refuse, OverwritePolicy::replace}) {
    create.overwrite = overwrite;
    EXPECT_THAT(
        [&] { formats::create_checkpoint(fs_, path(), plan.destination, {Value(7)}, create); },
        ThrowsError(ErrorKind::already_exists, "kept here"));
    EXPECT_THAT([&] { move_checkpoint(plan, source, fs_, path(), create, {}); },
                ThrowsError(ErrorKind::already_exists, "kept here"));
  }
  EXPECT_TRUE(all_files() == before);
}

// Shows E4.
TEST_P(ResumableMoveTest, TwoWritersOfOneDestinationAreRefused) {
  const MemoryCheckpoint source = small_source();
  const Plan plan = planned(source);
  formats::CreateOptions create = GetParam().create;
  create.journal.emplace();
  const auto first = formats::create_checkpoint(fs_, path(), plan.destination, {Value(7)}, create);
  for (const KeptWork kept : {KeptWork::refuse, KeptWork::resume, KeptWork::discard}) {
    EXPECT_THAT([&] { move(source, kept); },
                ThrowsError(ErrorKind::already_exists, "another process is writing"));
  }
}

// Shows E4.
TEST_P(ResumableMoveTest, WorkWithoutAFinishedBlockIsNotKept) {
  const MemoryCheckpoint source = large_source();
  CountingReader reader(source);
  reader.fail_after(0);
  EXPECT_THROW(move(reader, KeptWork::refuse), Error);
  EXPECT_TRUE(std::filesystem::is_empty(tmp_.path()));
}

}  // namespace
}  // namespace tessera::reshard
