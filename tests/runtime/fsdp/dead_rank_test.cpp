#include <gmock/gmock.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

/// Trains on `rank` of three processes; rank 1 dies in its second step. Returns what ended it.
std::string train(const std::string& store_path, int rank) {
  at::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::FileStore>(store_path, 3);
  dist::MeshOptions options;
  options.interface = "lo";
  options.timeout = std::chrono::seconds(10);
  const dist::Mesh mesh = dist::connect_gloo(store, rank, 3, options);
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

/// The error of each rank that stayed, by way of a pipe: a child must not run the parent's tests.
TEST(DeadRankTest, B22_TheOthersEndWithAnErrorThatNamesUnitAndCollective) {
  char path[] = "/tmp/tessera_dead_rank_XXXXXX";
  const int fd = ::mkstemp(path);
  ASSERT_GE(fd, 0);
  ::close(fd);
  ::unlink(path);
  int pipes[3][2];
  pid_t children[3];
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(::pipe(pipes[rank]), 0);
    children[rank] = ::fork();
    if (children[rank] == 0) {
      ::alarm(60);  // a rank that hangs dies of it
      const std::string error = train(path, rank);
      if (::write(pipes[rank][1], error.data(), error.size()) < 0) ::_exit(1);
      ::_exit(0);
    }
    ::close(pipes[rank][1]);
  }
  for (int rank = 0; rank < 3; ++rank) {
    std::string error;
    char buffer[4096];
    for (ssize_t n; (n = ::read(pipes[rank][0], buffer, sizeof buffer)) > 0;) {
      error.append(buffer, static_cast<std::size_t>(n));
    }
    ::close(pipes[rank][0]);
    int status = 0;
    ASSERT_EQ(::waitpid(children[rank], &status, 0), children[rank]);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ": " << status;
    if (rank == 1) continue;
    EXPECT_THAT(error, ::testing::HasSubstr("rank " + std::to_string(rank) + " of 3 (shard)"));
    EXPECT_THAT(error, ::testing::AnyOf(::testing::HasSubstr("reduce-scatter of down"),
                                        ::testing::HasSubstr("all-gather of ")));
  }
  ::unlink(path);
}

}  // namespace
}  // namespace tessera
