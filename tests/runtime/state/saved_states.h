#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/state/configurations.h"
#include "runtime/state/optimizers.h"

namespace tessera::test {

inline constexpr std::int64_t kNumRows =
    24;  // of a batch: 1, 2, 3, 4 and 8 ranks have equal shares

/// A model and its optimizer, distributed as a configuration says. A buffer counts the steps and
/// decides the data of each step, so a resumed run is right only if the buffer was loaded.
struct Trainer {
  Trainer(const Configuration& configuration, const dist::Mesh& its_mesh, OptimizerKind kind,
          at::ScalarType dtype = at::kFloat)
      : model(seeded<Transformer>()), mesh(its_mesh) {
    model->to(dtype);
    step = model->register_buffer("step", torch::zeros({}, at::kLong));
    configuration.apply(model, mesh);
    optimizer = make_optimizer(kind, unique_parameters(*model));
  }

  /// Trains, each rank on its rows. Returns the mean losses over all rows, the same on every rank.
  std::vector<double> train(int num_steps) {
    std::vector<double> losses;
    for (int i = 0; i < num_steps; ++i) {
      optimizer->zero_grad();
      const at::Tensor loss = forward(model, own_rows()).to(at::kFloat).pow(2).mean();
      loss.backward();
      if (uses_fused_step) {
        fused_step(*optimizer);
      } else {
        optimizer->step();
      }
      step.add_(1);
      const at::Tensor sum = loss.detach().to(at::kDouble);
      mesh.world()->all_reduce(sum, "loss").wait();
      losses.push_back(sum.item<double>() / mesh.world_size());
    }
    return losses;
  }

  /// Returns all tensors and values; by default whole, the same on every rank.
  StateDict state(const StateDictOptions& options = {}) {
    StateDict all = state_dict(*model, options);
    for (StateDict::Item& item : optim_state_dict(*model, *optimizer, options)) {
      all.set("optim." + item.fqn, item.entry);
    }
    return all;
  }

  Transformer model;
  dist::Mesh mesh;
  at::Tensor step;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  bool uses_fused_step = false;

 private:
  at::Tensor own_rows() const {
    const at::Tensor ids = torch::arange(3 * kNumRows).mul(2 * step + 3);
    const at::Tensor rows = ids.remainder(TransformerImpl::kVocabulary).view({kNumRows, 3});
    return rows.chunk(mesh.world_size())[static_cast<std::size_t>(mesh.rank())];
  }
};

/// Compares this rank's shards in a state dict with whole tensors, bit by bit.
void expect_same_shards(const StateDict& found, const StateDict& expected, const std::string& what);

/// Compares two state dicts of whole tensors, bit by bit.
void expect_same_state(const StateDict& found, const StateDict& expected, const std::string& what);

/// How long to train before a save and after it, and how.
struct RunOptions {
  OptimizerKind kind = OptimizerKind::adamw_two_groups;
  at::ScalarType dtype = at::kFloat;
  int num_steps_before = 3;
  int num_steps_after = 20;
  formats::Format format = formats::Format::native;
};

/// The state of a run when it saved, and its losses after that.
struct SavedRun {
  StateDict state;
  std::vector<double> losses;
};

/// Trains, saves at `path`, and continues training.
SavedRun run_that_saves(const Configuration& configuration, const std::string& path,
                        const RunOptions& options);

/// Continues training and expects the losses of the uninterrupted run. `tolerance`: relative.
void expect_to_go_on_as(const SavedRun& run, Trainer& trainer, double tolerance,
                        const std::string& what);

}  // namespace tessera::test
