#include <gmock/gmock.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

/// Trains on `rank` of three processes; rank 1 dies in its second step. Returns what ended it.
std::string train(const std::string& store_path, int rank) {
  at::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::FileStore>(store_path, 3);
  dist::MeshOptions options;
  options.transport = dist::gloo("lo");
  options.timeout = std::chrono::seconds(10);
  const dist::Mesh mesh = dist::connect(store, rank, 3, options);
  test::Mlp model;
  fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
  return test::error_of([&] {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = forward(model, torch::ones({2, 7})).sum();
      if (rank == 1 && step == 1) ::_exit(0);
      loss.backward();
    }
  });
}

constexpr const char* kRank = "TESSERA_TEST_DEAD_RANK";
constexpr const char* kStore = "TESSERA_TEST_DEAD_RANK_STORE";

/// What each process of the test below does: it must be a new program, as threads do not outlive a
/// fork.
TEST(DeadRankTest, DISABLED_AsOneRank) {
  const char* const rank = std::getenv(kRank);
  const char* const store = std::getenv(kStore);
  ASSERT_TRUE(rank != nullptr && store != nullptr) << "run by another test";
  ::alarm(60);  // a rank that hangs dies of it
  const std::string error = train(store, std::stoi(rank));
  std::ofstream(std::string(store) + ".error" + rank) << error;
}

TEST(DeadRankTest, B22_TheOthersEndWithAnErrorThatNamesUnitAndCollective) {
  char folder[] = "/tmp/tessera_dead_rank_XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string store = std::string(folder) + "/store";
  pid_t children[3];
  for (int rank = 0; rank < 3; ++rank) {
    children[rank] = ::fork();
    if (children[rank] == 0) {
      ::setenv(kRank, std::to_string(rank).c_str(), 1);
      ::setenv(kStore, store.c_str(), 1);
      ::execl("/proc/self/exe", "runtime_tests", "--gtest_also_run_disabled_tests",
              "--gtest_filter=DeadRankTest.DISABLED_AsOneRank", "--gtest_brief=1", nullptr);
      ::_exit(127);
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    int status = 0;
    ASSERT_EQ(::waitpid(children[rank], &status, 0), children[rank]);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ": " << status;
    if (rank == 1) continue;
    std::ifstream file(store + ".error" + std::to_string(rank));
    const std::string error(std::istreambuf_iterator<char>(file), {});
    EXPECT_THAT(error, ::testing::HasSubstr("rank " + std::to_string(rank) + " of 3 (shard)"));
    EXPECT_THAT(error, ::testing::AnyOf(::testing::HasSubstr("reduce-scatter of down"),
                                        ::testing::HasSubstr("all-gather of ")));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera
