#include <torch/torch.h>

#include "runtime/state/saved_states.h"
#include "support/temporary_directory.h"

// Saves a model under every configuration, and loads it under every other.

namespace tessera {
namespace {

using test::Configuration;
using test::OptimizerKind;
using test::Trainer;

struct Matrix {
  std::vector<int> world_sizes;
  test::RunOptions options;
};

/// How much another order of sums may change a loss.
double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 1e-2 : 1e-6;
}

/// Saves in every configuration, and loads each checkpoint in every configuration. Each
/// configuration also resumes training twice: from its own checkpoint (losses equal bit for bit),
/// and from the checkpoint of the configuration that is half the list away.
void run(const Matrix& matrix) {
  const test::TemporaryDirectory directory;
  const auto configurations = test::configurations(matrix.world_sizes);
  const std::size_t num = configurations.size();
  const auto path_of = [&](std::size_t i) {
    return directory.path() + "/" + configurations[i].name();
  };
  std::vector<test::SavedRun> runs;
  for (std::size_t i = 0; i < num; ++i) {
    runs.push_back(test::run_that_saves(configurations[i], path_of(i), matrix.options));
  }
  for (std::size_t i = 0; i < num; ++i) {
    const Configuration& to = configurations[i];
    const auto load_from = [&](std::size_t from, const dist::Mesh& mesh) {
      const std::string what = configurations[from].name() + " as " + to.name();
      test::stand_at("loading " + what);
      Trainer trainer(to, mesh, matrix.options.kind, matrix.options.dtype);
      TrainState state(trainer.model, *trainer.optimizer);
      load(state, path_of(from));
      test::expect_same_shards(trainer.state({.type = SHARDED}), runs[from].state, what);
      if (from == i) {
        test::expect_to_go_on_as(runs[from], trainer, 0, what);
      } else if (from == (i + num / 2) % num) {
        test::expect_same_state(trainer.state(), runs[from].state, what);
        test::expect_to_go_on_as(runs[from], trainer, tolerance_of(matrix.options.dtype), what);
      }
    };
    test::on_ranks(
        to.world_size,
        [&](const dist::Mesh& mesh) {
          for (std::size_t from = 0; from < num; ++from) load_from(from, mesh);
        },
        to.mesh_options());
  }
}

test::RunOptions three_steps_on(OptimizerKind kind, at::ScalarType dtype = at::kFloat,
                                formats::Format format = formats::Format::native) {
  return {.kind = kind, .dtype = dtype, .num_steps_after = 3, .format = format};
}

class MatrixTest : public ::testing::TestWithParam<OptimizerKind> {};

// Shows A4.
TEST_P(MatrixTest, SavedAnywhereLoadedAnywhere) {
  run({{1, 2}, three_steps_on(GetParam())});
}

INSTANTIATE_TEST_SUITE_P(Optimizers, MatrixTest, ::testing::ValuesIn(test::kOptimizerKinds),
                         [](const auto& test) { return test::name_of(test.param); });

// Shows A4.
TEST(CoreMatrixTest, BFloat16ParametersSavedAnywhereLoadedAnywhere) {
  run({{1, 2}, three_steps_on(OptimizerKind::adamw_two_groups, at::kBFloat16)});
}

// Shows A4.
TEST(CoreMatrixTest, ThreeRanks) {
  run({{1, 3}, three_steps_on(OptimizerKind::adamw_two_groups)});
}

// Shows A4.
TEST(CoreMatrixTest, ReplicasAndShardsOfFourRanks) {
  run({{1, 4}, three_steps_on(OptimizerKind::adamw_two_groups)});
}

// Shows A4.
TEST(CoreMatrixTest, SavedAsDcpLoadedAnywhere) {
  run({{1, 2}, three_steps_on(OptimizerKind::adamw_two_groups, at::kFloat, formats::Format::dcp)});
}

class SlowMatrixTest : public ::testing::TestWithParam<std::tuple<OptimizerKind, at::ScalarType>> {
};

// Shows A4.
TEST_P(SlowMatrixTest, TheWhole) {
  const auto [kind, dtype] = GetParam();
  run({{1, 2, 3, 4, 8}, three_steps_on(kind, dtype)});
}

INSTANTIATE_TEST_SUITE_P(All, SlowMatrixTest,
                         ::testing::Combine(::testing::ValuesIn(test::kOptimizerKinds),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& test) {
                           return test::name_of(std::get<0>(test.param)) +
                                  c10::toString(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace tessera
