#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "runtime/support/checks.h"
#include "runtime/support/processes.h"
#include "support/random.h"
#include "support/temporary_directory.h"

// Ranks are processes. One of them is killed during a save.

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr const char* kDirectory = "TESSERA_TEST_SAVES";
constexpr const char* kDoomed = "TESSERA_TEST_DOOMED";
constexpr const char* kDelay = "TESSERA_TEST_DELAY_US";
constexpr const char* kTimeOfDeath = ".time-of-death";  // a file that is not listed as a checkpoint

constexpr milliseconds kTimeout{1500};
/// Other ranks wait 1.5 timeouts for rank 0 to report the missing rank. Plus 1 s for other work.
constexpr milliseconds kLongestWait = kTimeout + kTimeout / 2 + milliseconds(1000);
constexpr milliseconds kLongestWork{5000};

void fill(torch::nn::Module& model, double value) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters()) parameter.fill_(value);
}

/// Time since the machine's start, the same clock in all processes.
std::int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

void die_in(milliseconds::rep delay_us, const std::string& directory) {
  std::thread([=] {
    ::usleep(static_cast<useconds_t>(delay_us));
    std::ofstream(directory + "/" + kTimeOfDeath) << now_ms();
    ::kill(::getpid(), SIGKILL);
  }).detach();
}

/// Saves one checkpoint after the other, each filled with its own number, until one rank is killed.
/// Returns the error that this rank gets then.
std::string save_until_one_is_killed(const dist::Mesh& mesh, const std::string& directory) {
  const bool is_doomed = mesh.rank() == std::stoi(std::getenv(kDoomed));
  std::string error = test::error_of([&] {
    test::Mlp model;
    fully_shard(*model, {.mesh = mesh});
    TrainState state(model);
    mesh.world()->max(0, "all are here");
    if (is_doomed) die_in(std::stoi(std::getenv(kDelay)), directory);
    for (int step = 1;; ++step) {
      fill(*model, step);
      save(state, directory + "/step-" + std::to_string(step),
           {.async = step % 2 == 0, .keep_last = 3, .timeout = kTimeout});
    }
  });
  while (is_doomed) ::pause();
  return error;
}

TEST(KilledSaveTest, DISABLED_AsOneRank) {
  test::as_process([](const dist::Mesh& mesh) {
    const std::string error = save_until_one_is_killed(mesh, std::getenv(kDirectory));
    return std::to_string(now_ms()) + " " + error;
  });
}

struct Killing {
  int world_size;
  int doomed;
  test::StorePlace store;
  std::int64_t delay_us;

  std::string text() const {
    return "rank " + std::to_string(doomed) + " of " + std::to_string(world_size) + " after " +
           std::to_string(delay_us) + " us, the store " +
           (store == test::StorePlace::file ? "in a file" : "in rank 0");
  }
};

Killing draw(test::Random& random, int world_size) {
  return {.world_size = world_size,
          .doomed = static_cast<int>(random.between(0, world_size)),
          .store = random.flip() ? test::StorePlace::file : test::StorePlace::rank0,
          .delay_us = random.between(0, 150'000)};
}

/// Expects an error soon after the rank died. `said`: the time of the error, and its message.
void expect_error_in_time(const std::string& said, const std::string& directory) {
  std::int64_t died_ms = 0;
  std::ifstream(directory + "/" + kTimeOfDeath) >> died_ms;
  std::istringstream words(said);
  std::int64_t ended_ms = 0;
  std::string error;
  std::getline(words >> ended_ms >> std::ws, error);
  EXPECT_TRUE(!error.empty() && error != "none") << said;
  EXPECT_LT(milliseconds(ended_ms - died_ms), kLongestWait + kLongestWork) << error;
}

/// Loads the latest valid checkpoint in one process. Returns its number; 0: there is none.
int load_latest(const std::string& directory, torch::nn::Module& model, TrainState& state) {
  const auto latest =
      formats::latest_valid(FileSystem::posix(), directory, formats::Validation::checksums);
  for (const auto& skipped : latest.skipped) {
    // Only unfinished saves and removals may be skipped, never a checkpoint under its final name.
    EXPECT_TRUE(skipped.path.ends_with(".partial") || skipped.path.ends_with(".removing"))
        << skipped.path << ": " << skipped.why;
  }
  if (latest.path.empty()) return 0;
  load(state, latest);
  const int step = std::stoi(latest.path.substr(latest.path.rfind('-') + 1));
  for (const at::Tensor& parameter : model.parameters()) {
    EXPECT_TRUE(parameter.detach().eq(step).all().item<bool>()) << latest.path;
  }
  return step;
}

void kill_one_rank(const Killing& killing) {
  const test::TemporaryDirectory directory;
  const auto said =
      test::run_processes(killing.world_size, "KilledSaveTest.DISABLED_AsOneRank",
                          {.environment = {{kDirectory, directory.path()},
                                           {kDoomed, std::to_string(killing.doomed)},
                                           {kDelay, std::to_string(killing.delay_us)}},
                           .doomed = killing.doomed,
                           .store = killing.store});
  for (int rank = 0; rank < killing.world_size; ++rank) {
    SCOPED_TRACE(killing.text() + ": rank " + std::to_string(rank));
    if (rank == killing.doomed) continue;
    expect_error_in_time(said[static_cast<std::size_t>(rank)], directory.path());
  }
  SCOPED_TRACE(killing.text());
  test::Mlp model;
  TrainState state(model);
  const int step = load_latest(directory.path(), *model, state);
  // Files that the killed trainer left do not prevent a restarted trainer from saving.
  save(state, directory / ("step-" + std::to_string(step + 1)));
}

/// Kills one rank of each of many jobs. Runs several jobs at a time, because ranks mostly wait.
void kill_often(int num_killings, const std::vector<int>& world_sizes, test::Random random) {
  constexpr int kNumAtOnce = 4;
  std::vector<Killing> killings;
  for (int i = 0; i < num_killings; ++i) {
    killings.push_back(draw(random, world_sizes[static_cast<std::size_t>(i) % world_sizes.size()]));
  }
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumAtOnce; ++i) {
    threads.emplace_back([&] {
      for (std::size_t k = next++; k < killings.size(); k = next++) kill_one_rank(killings[k]);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Shows E4.
TEST(KilledSaveTest, TheLastGoodCheckpointLoadsAndNobodyHangs) {
  kill_often(20, {2, 3}, test::Random());
}

class SlowKilledSaveTest : public testing::TestWithParam<int> {};

// Shows E4.
TEST_P(SlowKilledSaveTest, TheLastGoodCheckpointLoadsAndNobodyHangs) {
  kill_often(100, {2, 3, 4}, test::Random(static_cast<std::uint64_t>(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(Hundred, SlowKilledSaveTest, testing::Range(0, 10));

}  // namespace
}  // namespace tessera
