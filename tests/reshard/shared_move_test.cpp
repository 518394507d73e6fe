#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/forwarding_file_system.h"
#include "base/named_object.h"
#include "formats/native_checkpoint.h"
#include "formats/staging/shared_work.h"
#include "support/counting_reader.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/files.h"
#include "support/memory_checkpoint.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::Format;
using formats::KeptWork;
using test::CountingReader;
using test::FaultFileSystem;
using test::kSampleStep;
using test::MemoryCheckpoint;
using test::ThrowsError;

/// Two tensors of several blocks in every format, in pieces of several ranks, small ones, and a
/// value.
MemoryCheckpoint a_source() {
  test::Random random;
  MemoryCheckpoint source("source", 3);
  constexpr std::int64_t kRows = 3 << 10;
  constexpr std::int64_t kColumns = 1 << 10;
  const auto bytes = test::random_bytes(kRows * kColumns * 4, random);
  for (const char* name : {"v", "w"}) {
    std::vector<formats::Piece> pieces;
    for (int rank = 0; rank < 3; ++rank) {
      pieces.push_back({Box{{rank * kRows / 3, 0}, {kRows / 3, kColumns}}, rank});
    }
    source.add({name, DType::float32, {kRows, kColumns}}, bytes, pieces);
  }
  source.add({"x_empty", DType::float32, {0, 4}}, {});
  source.add({"y_step", DType::int64, {}}, test::bytes_of<std::int64_t>({42}));
  source.add_value("epoch", Value(7));
  return source;
}

struct SharedDestination {
  std::string name;
  std::string file;
  Format format;
  int world_size = 0;

  friend std::ostream& operator<<(std::ostream& out, const SharedDestination& destination) {
    return out << destination.name;
  }
};

class SharedMoveTest : public ::testing::TestWithParam<SharedDestination> {
 protected:
  Plan planned() const {
    return plan_reshard(source_.contents(), source_.path(),
                        {.format = GetParam().format, .world_size = GetParam().world_size});
  }
  formats::CreateOptions create_options(KeptWork kept_work = KeptWork::refuse) const {
    formats::CreateOptions create{.format = GetParam().format};
    create.journal.emplace();
    create.journal->kept_work = kept_work;
    return create;
  }
  std::string path() const { return tmp_ / GetParam().file; }

  SharedMoveOutcome move(const CheckpointReader& reader, int share, int num_shares,
                         KeptWork kept_work = KeptWork::refuse) {
    return move_share(planned(), reader, FileSystem::posix(), path(), create_options(kept_work),
                      {.share = share, .num_shares = num_shares}, {.num_threads = 2});
  }

  std::map<std::string, std::string> all_files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(tmp_.path())) {
      const std::string file = entry.path().string();
      if (entry.is_regular_file()) files[file.substr(tmp_.path().size())] = test::read_all(file);
    }
    return files;
  }
  /// Returns what one process writes, and removes it.
  std::map<std::string, std::string> by_one_process(const CheckpointReader& reader) {
    move_checkpoint(planned(), reader, FileSystem::posix(), path(), create_options(), {});
    auto files = all_files();
    for (const auto& entry : std::filesystem::directory_iterator(tmp_.path())) {
      std::filesystem::remove_all(entry.path());
    }
    return files;
  }

  MemoryCheckpoint source_ = a_source();
  test::TemporaryDirectory tmp_;
};

INSTANTIATE_TEST_SUITE_P(
    Formats, SharedMoveTest,
    ::testing::Values(SharedDestination{"native", "c", Format::native, 3},
                      SharedDestination{"dcp", "c", Format::dcp, 2},
                      SharedDestination{"safetensors", "c.safetensors", Format::safetensors},
                      SharedDestination{"torch_zip", "c.pt", Format::torch_zip},
                      SharedDestination{"deepspeed", "c", Format("deepspeed")},
                      SharedDestination{"rank_files", "c", Format("rank_files")}),
    [](const auto& each) { return each.param.name; });

TEST_P(SharedMoveTest, AnyNumberOfSharesGivesTheBytesOfOneProcessAndReadsNoMore) {
  CountingReader alone(source_);
  const auto expected = by_one_process(alone);
  for (const int number : {1, 2, 3, 8}) {
    SCOPED_TRACE(number);
    CountingReader reader(source_);
    for (int i = 0; i < number; ++i) {
      EXPECT_FALSE(FileSystem::posix().kind_of(path()).has_value());
      const SharedMoveOutcome outcome = move(reader, number - 1 - i, number);
      EXPECT_EQ(outcome.is_finished, i == number - 1);
      EXPECT_EQ(outcome.missing.size(), static_cast<std::size_t>(number - 1 - i));
    }
    EXPECT_LE(static_cast<double>(reader.nbytes_read()),
              1.05 * static_cast<double>(alone.nbytes_read()));
    EXPECT_TRUE(all_files() == expected);
    for (const auto& entry : std::filesystem::directory_iterator(tmp_.path())) {
      std::filesystem::remove_all(entry.path());
    }
  }
}

/// Counts how many files are opened and how many directories are synced.
class CountingFileSystem final : public ForwardingFileSystem {
 public:
  CountingFileSystem() : ForwardingFileSystem(FileSystem::posix()) {}

  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    ++num_opened;
    return ForwardingFileSystem::open(path);
  }
  void sync_directory(const std::string& path) override {
    ++num_synced;
    ForwardingFileSystem::sync_directory(path);
  }

  mutable std::atomic<int> num_opened = 0;
  std::atomic<int> num_synced = 0;
};

TEST_P(SharedMoveTest, ManySharesWithoutBlocksCostLittleEach) {
  constexpr int kNumShares = 100;
  CountingFileSystem fs;
  const SharedMoveOutcome outcome = move_share(
      planned(), source_, fs, path(), create_options(),
      {.num_shares = kNumShares, .other_shares = SharedMoveOptions::OtherShares::take_over}, {});
  EXPECT_TRUE(outcome.is_finished);
  EXPECT_EQ(outcome.shares.size(), static_cast<std::size_t>(kNumShares));
  EXPECT_LT(fs.num_synced, kNumShares / 2);
  EXPECT_LT(fs.num_opened, 12 * kNumShares);
}

TEST_P(SharedMoveTest, AnInterruptedShareIsResumed) {
  CountingReader reader(source_);
  const auto expected = by_one_process(reader);
  move(reader, 0, 2);
  reader.fail_after(9 << 20);
  EXPECT_THAT([&] { move(reader, 1, 2); }, ThrowsError(ErrorKind::io, "pulled plug"));
  reader.fail_after(std::uint64_t{1} << 40);
  EXPECT_THAT([&] { move(reader, 1, 2); }, ThrowsError(ErrorKind::already_exists, "part 1 of 2"));
  const SharedMoveOutcome outcome = move(reader, 1, 2, KeptWork::resume);
  EXPECT_TRUE(outcome.is_finished);
  EXPECT_GT(outcome.shares.at(0).resumed_nbytes, 0U);
  EXPECT_TRUE(all_files() == expected);
}

TEST_P(SharedMoveTest, DiscardWritesACompleteShareAgain) {
  CountingReader reader(source_);
  const auto expected = by_one_process(reader);
  move(reader, 0, 2);
  EXPECT_TRUE(move(reader, 0, 2).shares.at(0).was_complete);
  EXPECT_TRUE(move(reader, 0, 2, KeptWork::resume).shares.at(0).was_complete);
  const std::uint64_t nbytes_before = reader.nbytes_read();
  const SharedMoveOutcome again = move(reader, 0, 2, KeptWork::discard);
  EXPECT_FALSE(again.shares.at(0).was_complete);
  EXPECT_EQ(again.shares.at(0).resumed_nbytes, 0U);
  EXPECT_GT(reader.nbytes_read(), nbytes_before);
  ASSERT_EQ(again.missing.size(), 1U);
  EXPECT_EQ(again.missing.at(0).index, 1);
  EXPECT_TRUE(move(reader, 1, 2).is_finished);
  EXPECT_TRUE(all_files() == expected);
}

MemoryCheckpoint small_source(float first) {
  MemoryCheckpoint source("small", 2);
  source.add({"v", DType::float32, {4}}, test::bytes_of<float>({first, 2, 3, 4}),
             {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
  source.add({"w", DType::float32, {2}}, test::bytes_of<float>({first, 6}),
             {{Box{{0}, {1}}, 0}, {Box{{1}, {1}}, 1}});
  source.add_value("epoch", Value(7));
  return source;
}

using Files = std::map<std::string, std::string>;  // key: path below the test's folder

/// Two workers replace a checkpoint; one of them dies.
class DyingWorkerTest : public SharedMoveTest {
 protected:
  DyingWorkerTest() { source_ = small_source(1); }

  void write_old() {
    const MemoryCheckpoint old = small_source(100);
    move_checkpoint(planned(), old, quick_, path(), create_options(), {});
  }
  SharedMoveOutcome replace(FileSystem& fs, int share, KeptWork kept_work) {
    formats::CreateOptions create = create_options(kept_work);
    create.overwrite = OverwritePolicy::replace;
    return move_share(planned(), source_, fs, path(), create, {.share = share, .num_shares = 2},
                      {.num_threads = 1});
  }
  SharedMoveOutcome finish() {
    formats::CreateOptions create = create_options();
    create.overwrite = OverwritePolicy::replace;
    return finish_shares(planned(), source_, quick_, path(), create);
  }
  /// Returns the files of the destination.
  std::map<std::string, std::string> destination_files() const {
    auto files = all_files();
    std::erase_if(
        files, [](const auto& file) { return file.first.find(".partial") != std::string::npos; });
    return files;
  }
  /// Returns all files without an empty journal, which the next writer uses.
  Files files_but_journal() const {
    Files files = all_files();
    if (!FileSystem::posix().kind_of(path() + ".partial")) {
      files.erase("/" + GetParam().file + ".partial.journal");
    }
    return files;
  }
  bool kill_last_worker_at(std::int64_t operation, bool is_stepwise);
  void kill_last_worker_after_exchange();
  /// Replaces the destination by `source`, in a process that dies at an operation. Returns whether
  /// it died.
  bool replace_alone(const MemoryCheckpoint& source, std::int64_t operation) {
    FaultFileSystem fs(FileSystem::posix(), tmp_.path());
    fs.fail_operation(operation, FaultFileSystem::Fault::from_then_on);
    formats::CreateOptions create = create_options();
    create.overwrite = OverwritePolicy::replace;
    try {
      move_checkpoint(planned(), source, fs, path(), create, {.num_threads = 1});
    } catch (const Error&) {
      EXPECT_TRUE(fs.has_failed());
    }
    return fs.has_failed();
  }
  void replace_alone(const MemoryCheckpoint& source) { replace_alone(source, 1'000'000); }
  /// Brings back the workers' folder, which the next writer removes, as if that writer had been
  /// killed before it could. Returns the staging path.
  std::string put_back_folder(const std::string& copy) const {
    std::string staging_path = path() + ".partial";
    std::filesystem::remove_all(staging_path + ".shares");
    std::filesystem::copy(copy, staging_path + ".shares");
    return staging_path;
  }
  void expect_new_wherever_the_last_worker_dies(const Files& old, const Files& expected,
                                                bool is_stepwise);
  void remove_everything() const {
    for (const auto& entry : std::filesystem::directory_iterator(tmp_.path())) {
      std::filesystem::remove_all(entry.path());
    }
  }

  FaultFileSystem quick_{FileSystem::posix(), tmp_.path()};  // fails nothing, and does not sync
  std::int64_t exchange_operation_ = 0;                      // where to look for the exchange first
};

INSTANTIATE_TEST_SUITE_P(
    Formats, DyingWorkerTest,
    ::testing::Values(SharedDestination{"native", "c", Format::native, 2},
                      SharedDestination{"dcp", "c", Format::dcp, 2},
                      SharedDestination{"safetensors", "c", Format::safetensors},
                      SharedDestination{"torch_zip", "c.pt", Format::torch_zip}),
    [](const auto& each) { return each.param.name; });

/// A file system that cannot exchange two names in one step, such as NFS.
class StepwiseFileSystem final : public ForwardingFileSystem {
 public:
  using ForwardingFileSystem::ForwardingFileSystem;

  void exchange(const std::string& a, const std::string& b) override {
    const std::string aside = tessera::detail::path_in_exchange(a, b);
    rename(b, aside);
    rename(a, b);
    rename(aside, a);
  }
};

/// Replaces the old checkpoint by two workers, of which the second dies at an operation. Returns
/// whether it died: there may be fewer operations.
bool DyingWorkerTest::kill_last_worker_at(std::int64_t operation, bool is_stepwise) {
  remove_everything();
  write_old();
  replace(quick_, 0, KeptWork::refuse);
  FaultFileSystem fs(FileSystem::posix(), tmp_.path());
  fs.fail_operation(operation, FaultFileSystem::Fault::from_then_on);
  StepwiseFileSystem stepwise(fs);
  try {
    replace(is_stepwise ? static_cast<FileSystem&>(stepwise) : fs, 1, KeptWork::refuse);
  } catch (const Error&) {
    EXPECT_TRUE(fs.has_failed());
  }
  return fs.has_failed();
}

// The last worker also finishes the move, so it also dies during the finishing steps.
TEST_P(DyingWorkerTest, TheNewCheckpointAppearsWhereverTheLastWorkerDies) {
  const auto expected = by_one_process(source_);
  write_old();
  const auto old = destination_files();
  for (const bool is_stepwise : {false, true}) {
    SCOPED_TRACE(is_stepwise ? "an exchange in steps" : "an exchange");
    expect_new_wherever_the_last_worker_dies(old, expected, is_stepwise);
  }
}

void DyingWorkerTest::expect_new_wherever_the_last_worker_dies(const Files& old,
                                                               const Files& expected,
                                                               bool is_stepwise) {
  bool has_died = true;
  for (std::int64_t operation = 0; has_died; operation += kSampleStep) {
    SCOPED_TRACE(operation);
    has_died = kill_last_worker_at(operation, is_stepwise);
    const Files left = destination_files();
    ASSERT_TRUE(left == old || left == expected || (is_stepwise && left.empty()));
    SharedMoveOutcome outcome = finish();
    if (!outcome.is_finished) {
      ASSERT_EQ(outcome.missing.size(), 1U);
      ASSERT_EQ(outcome.missing.at(0).index, 1);
      outcome = replace(quick_, 1, KeptWork::resume);
    }
    EXPECT_TRUE(outcome.is_finished);
    ASSERT_TRUE(files_but_journal() == expected);
  }
}

TEST_P(DyingWorkerTest, WorkThatIsNowhereIsNotTakenForFinished) {
  write_old();
  replace(quick_, 0, KeptWork::refuse);
  formats::SharedWork(quick_, path()).begin_exchange();
  std::filesystem::remove_all(path() + ".partial");
  EXPECT_THAT([&] { finish(); },
              ThrowsError(ErrorKind::mismatch, "shared work: expected the new checkpoint here"));
}

TEST_P(DyingWorkerTest, DiscardedWorkLeavesTheCheckpointWhereverTheLastWorkerDies) {
  const auto expected = by_one_process(source_);
  write_old();
  const auto old = destination_files();
  bool has_died = true;
  for (std::int64_t operation = 0; has_died; operation += kSampleStep) {
    SCOPED_TRACE(operation);
    has_died = kill_last_worker_at(operation, /*is_stepwise=*/true);
    formats::SharedWork(quick_, path()).discard();
    ASSERT_TRUE(files_but_journal() == old || files_but_journal() == expected);
  }
}

/// Two workers replace the old checkpoint. The second dies after the two have swapped paths, before
/// it removes the old one.
void DyingWorkerTest::kill_last_worker_after_exchange() {
  const std::string exchange = path() + ".partial.shares/exchange";
  for (bool has_died = true; has_died; ++exchange_operation_) {
    has_died = kill_last_worker_at(exchange_operation_, /*is_stepwise=*/false);
    if (!std::filesystem::exists(exchange)) continue;
    const auto inode = std::to_string(tessera::detail::inode_of_name(path()).value());
    if (test::read_all(exchange) == inode + "\n") return;
  }
  FAIL() << "there was no exchange";
}

TEST_P(DyingWorkerTest, TheNextWriterRemovesWhatFinishedWorkersLeft) {
  const MemoryCheckpoint later = small_source(200);
  const auto expected = by_one_process(later);
  kill_last_worker_after_exchange();
  replace_alone(later);
  EXPECT_TRUE(files_but_journal() == expected);
}

// A file system may give the inode number of a removed folder to the next one.
TEST_P(DyingWorkerTest, FinishedWorkIsNotTakenForThatOfALaterWriter) {
  const MemoryCheckpoint later = small_source(200);
  kill_last_worker_after_exchange();
  const std::string copy = tmp_ / "copy";
  std::filesystem::copy(path() + ".partial.shares", copy);
  replace_alone(later);
  const auto expected = destination_files();
  bool has_left = false;
  bool has_died = true;
  for (std::int64_t operation = 0; has_died; ++operation) {
    SCOPED_TRACE(operation);
    has_died = replace_alone(later, operation);
    const std::string staging_path = put_back_folder(copy);
    if (const auto inode = tessera::detail::inode_of_name(staging_path)) {
      has_left = true;
      test::write_file(staging_path + ".shares/exchange", std::to_string(*inode) + "\n");
    }
    EXPECT_FALSE(formats::SharedWork(quick_, path()).is_begun());
    try {
      EXPECT_TRUE(finish().missing.empty());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::mismatch) << error.what();
    }
    ASSERT_TRUE(destination_files() == expected);
    for (const char* suffix : {"", ".journal", ".shares"}) {
      std::filesystem::remove_all(staging_path + suffix);
    }
  }
  EXPECT_TRUE(has_left);
}

// After both exchanges, the first workers' checkpoint is at the staging path.
TEST_P(DyingWorkerTest, FinishedWorkDoesNotReplaceALaterCheckpoint) {
  const MemoryCheckpoint later = small_source(200);
  const auto expected = by_one_process(later);
  bool has_exchanged = false;
  bool has_died = true;
  for (std::int64_t operation = 0; has_died && !has_exchanged; ++operation) {
    SCOPED_TRACE(operation);
    kill_last_worker_after_exchange();
    const std::string copy = tmp_ / "copy";
    std::filesystem::copy(path() + ".partial.shares", copy);
    has_died = replace_alone(later, operation);
    const std::string staging_path = put_back_folder(copy);
    std::filesystem::remove_all(copy);
    if (destination_files() != expected || !std::filesystem::exists(staging_path)) continue;
    has_exchanged = true;
    EXPECT_THAT([&] { finish(); },
                ThrowsError(ErrorKind::mismatch, "shared work: expected the new checkpoint here"));
    ASSERT_TRUE(destination_files() == expected);
  }
  EXPECT_TRUE(has_exchanged);
}

// As if the last worker was killed after it had exchanged the checkpoints.
TEST_P(DyingWorkerTest, AReplacedCheckpointStaysIfItHoldsAFileOfAnotherProgram) {
  write_old();
  const std::string replaced = path() + ".partial";
  const std::string notes = replaced + "/notes.txt";
  std::filesystem::copy(path(), replaced, std::filesystem::copy_options::recursive);
  test::write_file(replaced + ".journal", "tessera-journal 1\n");
  const auto finish = [&] {
    return finish_shares(planned(), source_, quick_, path(), create_options()).is_finished;
  };
  if (std::filesystem::is_directory(replaced)) {
    test::write_file(notes, "mine");
    EXPECT_TRUE(finish());
    EXPECT_EQ(test::read_all(notes), "mine");
    std::filesystem::remove(notes);
  }
  EXPECT_TRUE(finish());
  EXPECT_FALSE(std::filesystem::exists(replaced));
  EXPECT_FALSE(std::filesystem::exists(replaced + ".journal"));
}

TEST_P(SharedMoveTest, AWriterThatWorksAloneIsRefused) {
  move(source_, 0, 2);
  const auto alone = [&] {
    move_checkpoint(planned(), source_, FileSystem::posix(), path(), {.format = GetParam().format},
                    {});
  };
  const auto before = all_files();
  EXPECT_THAT(alone, ThrowsError(ErrorKind::already_exists, "several workers"));
  EXPECT_TRUE(all_files() == before);
}

}  // namespace
}  // namespace tessera::reshard
