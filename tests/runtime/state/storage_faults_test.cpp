#include <gmock/gmock.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "runtime/state/small_trainer.h"
#include "support/fault_file_system.h"
#include "support/temporary_directory.h"

// Saving and loading when file operations fail.

namespace tessera {
namespace {

using formats::Format;
using test::error_of;
using test::expect_filled;
using test::FaultFileSystem;
using test::SmallTrainer;
using test::TemporaryDirectory;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Fault = FaultFileSystem::Fault;

/// What one rank needs to save repeatedly, and to load the latest valid checkpoint.
struct FaultyRank {
  FaultyRank(const dist::Mesh& its_mesh, const std::string& its_directory)
      : mesh(its_mesh), directory(its_directory), saving(mesh), loading(mesh) {
    options.overwrite = OverwritePolicy::replace;
    options.keep_last = 2;
    options.file_system = &fs;
  }

  std::string step_path(std::int64_t number) const {
    return directory + "/step-" + std::to_string(number);
  }

  /// Returns the error, or "none".
  std::string save_numbered(std::int64_t number, const std::string& path) {
    saving.fill(number);
    return error_of([&] {
      save(saving_state, path, options);
      saving_state.wait();
    });
  }

  /// Loads the latest valid checkpoint completely. Returns its number.
  std::int64_t load_latest() {
    const auto latest =
        formats::latest_valid(FileSystem::posix(), directory, formats::Validation::checksums);
    EXPECT_EQ(error_of([&] { load(loading_state, latest); }), "none");
    expect_filled(loading.model->parameters(), loading.number, latest.path);
    expect_filled(loading.moments(), loading.number, latest.path);
    return loading.number;
  }

  /// Whether any rank's operation has failed. Collective.
  bool has_failed() const { return mesh.world()->max(fs.has_failed() ? 1 : 0, "failed") > 0; }

  const dist::Mesh& mesh;
  std::string directory;
  FaultFileSystem fs{FileSystem::posix(), directory};
  SmallTrainer saving;
  SmallTrainer loading;
  TrainState saving_state = saving.state();
  TrainState loading_state = loading.state();
  SaveOptions options{};
};

std::string error_of_rank(int failing_rank, int rank) {
  return failing_rank == rank ? "injected failure" : "rank " + std::to_string(failing_rank) + ": ";
}

bool is_complete(const std::string& error) {
  return error == "none" || error.find("is complete") != std::string::npos;
}

/// Checks the number `found` after a save of `number` over `before` that ended with `error`.
void expect_whole_or_as_before(std::int64_t found, std::int64_t before, std::int64_t number,
                               const std::string& error, Fault fault) {
  if (is_complete(error)) {
    EXPECT_EQ(found, number);
  } else if (fault == Fault::once) {
    EXPECT_EQ(found, before);
  } else {
    EXPECT_THAT(found, AnyOf(before, number));  // the last rename cannot be undone
  }
}

enum class Destination { is_new, is_replaced };

struct Saving {
  bool async = false;
  std::vector<Destination> destinations{Destination::is_new, Destination::is_replaced};
  std::int64_t every = 1;  // 1: all operations fail in turn; 4: every fourth
};

/// Saves once for each file operation of `failing_rank` in a save, and makes this operation fail.
void fail_each_operation(FaultyRank& run, const Saving& saving, Destination destination,
                         int failing_rank, Fault fault) {
  const auto path_of = [&](std::int64_t number) {
    return run.step_path(destination == Destination::is_new ? number : 0);
  };
  ASSERT_EQ(run.save_numbered(0, path_of(0)), "none");
  for (std::int64_t number = 1;; ++number) {
    const std::int64_t index = (number - 1) * saving.every;
    const std::string path = path_of(number);
    run.fs.fail_operation(run.mesh.rank() == failing_rank ? index : -1, fault);
    const std::string error = run.save_numbered(number, path);
    const bool is_there = FileSystem::posix().kind_of(path).has_value();  // right after the save
    const bool has_failed = run.has_failed();
    SCOPED_TRACE("operation " + std::to_string(index) + ": " + error);
    run.fs.fail_operation(-1);
    test::stand_at("operation " + std::to_string(index));
    if (error != "none") {
      ASSERT_TRUE(has_failed);
      EXPECT_THAT(error, HasSubstr(error_of_rank(failing_rank, run.mesh.rank())));
    }
    if (destination == Destination::is_new && fault == Fault::once) {
      EXPECT_EQ(is_there, is_complete(error));
    }
    expect_whole_or_as_before(run.load_latest(), number - 1, number, error, fault);
    ASSERT_EQ(run.save_numbered(number, path), "none");  // over whatever files were left
    EXPECT_EQ(run.load_latest(), number);
    if (!has_failed) {
      EXPECT_GT(index, failing_rank == 0 ? 40 : 10);
      return;
    }
  }
}

void fail_each_operation(const Saving& saving, Fault fault) {
  for (const Format format : {Format::native, Format::dcp}) {
    for (const Destination destination : saving.destinations) {
      for (const int failing_rank : {0, 1}) {
        const TemporaryDirectory directory;
        test::on_ranks(2, [&](const dist::Mesh& mesh) {
          FaultyRank run(mesh, directory.path());
          run.options.format = format;
          run.options.async = saving.async;
          fail_each_operation(run, saving, destination, failing_rank, fault);
        });
      }
    }
  }
}

constexpr Fault kFaults[] = {Fault::once, Fault::from_then_on};

// Shows E4.
TEST(StorageFaultsTest, OperationsOfASaveFailing) {
  for (const Fault fault : kFaults) fail_each_operation({.every = 4}, fault);
}

// Shows E5.
TEST(StorageFaultsTest, OperationsOfASaveInTheBackgroundFailing) {
  for (const Fault fault : kFaults) {
    fail_each_operation({.async = true, .destinations = {Destination::is_new}, .every = 6}, fault);
  }
}

// Shows E4, E5.
TEST(SlowStorageFaultsTest, AnyOperationOfASaveFailing) {
  for (const Fault fault : kFaults) {
    fail_each_operation({}, fault);
    fail_each_operation({.async = true, .destinations = {Destination::is_new}}, fault);
  }
}

/// Loads once for each file operation of `failing_rank` in a load, and makes this operation fail.
void fail_each_operation_of_load(FaultyRank& run, int failing_rank) {
  ASSERT_EQ(run.save_numbered(1, run.step_path(1)), "none");
  for (std::int64_t index = 0;; ++index) {
    run.loading.fill(-1);
    run.fs.fail_operation(run.mesh.rank() == failing_rank ? index : -1);
    const std::string error =
        error_of([&] { load(run.loading_state, run.step_path(1), {.file_system = &run.fs}); });
    const bool has_failed = run.has_failed();
    SCOPED_TRACE("operation " + std::to_string(index) + ": " + error);
    if (has_failed) {
      EXPECT_THAT(error, HasSubstr(error_of_rank(failing_rank, run.mesh.rank())));
      EXPECT_EQ(run.loading.number, -1);
    } else {
      EXPECT_EQ(error, "none");
    }
    EXPECT_EQ(run.load_latest(), 1);
    if (!has_failed) {
      EXPECT_GT(index, 10);
      return;
    }
  }
}

// Shows E4.
TEST(StorageFaultsTest, AnyOperationOfALoadFailingIsAnErrorOnAllRanks) {
  for (const Format format : {Format::native, Format::dcp}) {
    for (const int failing_rank : {0, 1}) {
      const TemporaryDirectory directory;
      test::on_ranks(2, [&](const dist::Mesh& mesh) {
        FaultyRank run(mesh, directory.path());
        run.options.format = format;
        fail_each_operation_of_load(run, failing_rank);
      });
    }
  }
}

/// Prevents this process's files from growing, like a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::uintmax_t nbytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{nbytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  sighandler_t handler_;
  rlimit before_{};
};

std::uintmax_t largest_file_in(const std::string& directory) {
  std::uintmax_t largest = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    largest = std::max(largest, entry.file_size());
  }
  return largest;
}

// Shows E4.
TEST(StorageFaultsTest, ADiskThatIsFull) {
  constexpr int kNumLimits = 16;
  for (const Format format : {Format::native, Format::dcp}) {
    const TemporaryDirectory directory;
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      FaultyRank run(mesh, directory.path());
      run.options.format = format;
      run.options.file_system = &FileSystem::posix();
      ASSERT_EQ(run.save_numbered(0, run.step_path(0)), "none");
      const std::uintmax_t largest = largest_file_in(run.step_path(0));
      for (int number = 1; number <= kNumLimits; ++number) {
        mesh.world()->max(0, "before the limit");
        std::optional<FileSizeLimit> limit;
        if (mesh.rank() == 0) {
          limit.emplace(largest * static_cast<std::uintmax_t>(number - 1) / kNumLimits);
        }
        mesh.world()->max(0, "the limit is there");
        const std::string error = run.save_numbered(number, run.step_path(number));
        mesh.world()->max(0, "the limit has been met");
        limit.reset();
        mesh.world()->max(0, "the limit is gone");
        EXPECT_THAT(error, HasSubstr("File too large"));
        EXPECT_EQ(run.load_latest(), number - 1);
        ASSERT_EQ(run.save_numbered(number, run.step_path(number)), "none");
        EXPECT_EQ(run.load_latest(), number);
      }
    });
  }
}

}  // namespace
}  // namespace tessera
