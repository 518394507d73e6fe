#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include "runtime/support/checks.h"
#include "runtime/support/processes.h"

namespace tessera {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Trains as one of three ranks. Rank 1 exits in its second step. Returns this rank's error.
TEST(DeadRankTest, DISABLED_AsOneRank) {
  test::as_process([](const dist::Mesh& mesh) {
    test::Mlp model;
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
    return test::error_of([&] {
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = forward(model, torch::ones({2, 7})).sum();
        if (mesh.rank() == 1 && step == 1) ::_exit(0);
        loss.backward();
      }
    });
  });
}

// Shows B22.
TEST(DeadRankTest, TheOthersEndWithAnErrorThatNamesUnitAndCollective) {
  const std::vector<std::string> errors = test::run_processes(3, "DeadRankTest.DISABLED_AsOneRank");
  for (const std::size_t rank : {0U, 2U}) {
    EXPECT_THAT(errors[rank], HasSubstr("rank " + std::to_string(rank) + " of 3 (shard)"));
    EXPECT_THAT(errors[rank],
                AnyOf(HasSubstr("reduce-scatter of down"), HasSubstr("all-gather of ")));
  }
}

}  // namespace
}  // namespace tessera
