#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "runtime/support/checks.h"
#include "runtime/support/processes.h"
#include "support/random.h"
#include "support/temporary_directory.h"

// Ranks as processes, of which one is killed while all save.

namespace tessera {
namespace {

constexpr const char* kDirectory = "TESSERA_TEST_SAVES";
constexpr const char* kDoomed = "TESSERA_TEST_DOOMED";
constexpr const char* kDelay = "TESSERA_TEST_DELAY_US";

void fill(torch::nn::Module& model, double value) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters()) parameter.fill_(value);
}

/// Saves one checkpoint after the other, each full of its own number, until one of them is killed.
TEST(KilledSaveTest, DISABLED_AsOneRank) {
  test::as_process([](const dist::Mesh& mesh) {
    test::Mlp model;
    fully_shard(*model, {.mesh = mesh});
    TrainState state(model);
    if (mesh.rank() == std::stoi(std::getenv(kDoomed))) {
      std::thread([] {
        ::usleep(static_cast<useconds_t>(std::stoi(std::getenv(kDelay))));
        ::kill(::getpid(), SIGKILL);
      }).detach();
    }
    return test::error_of([&] {
      for (int step = 1;; ++step) {
        fill(*model, step);
        save(state, std::string(std::getenv(kDirectory)) + "/step-" + std::to_string(step),
             {.async = step % 2 == 0, .keep_last = 3});
      }
    });
  });
}

void kill_one_rank(int round, int delay_us) {
  const test::TemporaryDirectory directory;
  const int world_size = 2;
  const int doomed = round % world_size;
  const auto said = test::run_processes(world_size, "KilledSaveTest.DISABLED_AsOneRank",
                                        {.timeout = std::chrono::milliseconds(1500),
                                         .environment = {{kDirectory, directory.path()},
                                                         {kDoomed, std::to_string(doomed)},
                                                         {kDelay, std::to_string(delay_us)}},
                                         .doomed = doomed});
  EXPECT_NE(said[static_cast<std::size_t>(1 - doomed)], "none") << "round " << round;
  const auto latest =
      formats::latest_valid(FileSystem::posix(), directory.path(), formats::Validation::checksums);
  for (const auto& skipped : latest.skipped) {
    // What was being written, and what was being removed; never a checkpoint under its name.
    EXPECT_TRUE(skipped.path.ends_with(".partial") || skipped.path.ends_with(".removing"))
        << skipped.path << ": " << skipped.why;
  }
  if (latest.path.empty()) return;  // killed before the first was complete
  test::Mlp model;
  TrainState state(model);
  load(state, latest);
  const double step = std::stod(latest.path.substr(latest.path.rfind('-') + 1));
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(parameter.detach().eq(step).all().item<bool>()) << latest.path;
  }
  // A trainer that starts again is not kept from saving by what the killed one left.
  save(state, directory.path() + "/step-" + std::to_string(static_cast<int>(step) + 1));
}

/// Several at a time: ranks mostly wait.
void kill_in_rounds(int num_rounds) {
  test::Random random;
  constexpr int kNumAtOnce = 4;
  for (int first = 0; first < num_rounds; first += kNumAtOnce) {
    std::vector<std::thread> rounds;
    for (int round = first; round < std::min(first + kNumAtOnce, num_rounds); ++round) {
      rounds.emplace_back(kill_one_rank, round, static_cast<int>(random.between(0, 150'000)));
    }
    for (std::thread& each : rounds) each.join();
  }
}

TEST(KilledSaveTest, E4_TheLastGoodCheckpointLoadsAndNobodyHangs) {
  kill_in_rounds(40);
}

}  // namespace
}  // namespace tessera
