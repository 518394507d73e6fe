#include <torch/torch.h>

#include "runtime/state/saved_states.h"
#include "support/temporary_directory.h"

// Every way to spread a model saved, and loaded into every other.

namespace tessera {
namespace {

using test::Configuration;
using test::OptimizerKind;
using test::Trainer;

struct Matrix {
  OptimizerKind kind;
  at::ScalarType dtype;
  std::vector<int> world_sizes;
  formats::Format format = formats::Format::native;
};

void run(const Matrix& matrix) {
  const test::TemporaryDirectory directory;
  const auto configurations = test::configurations(matrix.world_sizes);
  std::vector<StateDict> saved(configurations.size());
  for (std::size_t i = 0; i < configurations.size(); ++i) {
    const Configuration& from = configurations[i];
    test::on_ranks(
        from.world_size,
        [&](const dist::Mesh& mesh) {
          Trainer trainer(from, mesh, matrix.kind, matrix.dtype);
          trainer.train(2);
          TrainState state(trainer.model, *trainer.optimizer);
          save(state, directory.path() + "/" + from.name(), {.format = matrix.format});
          StateDict whole = trainer.whole();
          if (mesh.rank() == 0) saved[i] = std::move(whole);
        },
        from.mesh_options());
  }
  for (const Configuration& to : configurations) {
    test::on_ranks(
        to.world_size,
        [&](const dist::Mesh& mesh) {
          for (std::size_t i = 0; i < configurations.size(); ++i) {
            const std::string from = configurations[i].name();
            Trainer trainer(to, mesh, matrix.kind, matrix.dtype);
            TrainState state(trainer.model, *trainer.optimizer);
            test::stand_at("loading " + from + " as " + to.name());
            load(state, directory.path() + "/" + from);
            test::expect_same_state(trainer.whole(), saved[i], from + " as " + to.name());
          }
        },
        to.mesh_options());
  }
}

class CoreMatrixTest : public ::testing::TestWithParam<OptimizerKind> {};

TEST_P(CoreMatrixTest, A4_SavedAnywhereLoadedAnywhere) {
  run({GetParam(), at::kFloat, {1, 2, 3}});
}

INSTANTIATE_TEST_SUITE_P(Optimizers, CoreMatrixTest, ::testing::ValuesIn(test::kOptimizerKinds),
                         [](const auto& test) { return test::name_of(test.param); });

TEST(MatrixTest, A4_BFloat16ParametersSavedAnywhereLoadedAnywhere) {
  run({OptimizerKind::adamw_two_groups, at::kBFloat16, {1, 2}});
}

TEST(MatrixTest, A4_SavedAsDcpLoadedAnywhere) {
  run({OptimizerKind::adamw_two_groups, at::kFloat, {1, 2}, formats::Format::dcp});
}

}  // namespace
}  // namespace tessera
