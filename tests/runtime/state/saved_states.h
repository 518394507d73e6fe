#pragma once

#include <gtest/gtest.h>

#include <string>

#include "runtime/state/configurations.h"
#include "runtime/state/optimizers.h"

namespace tessera::test {

/// A model and its optimizer, spread as a configuration says.
struct Trainer {
  Trainer(const Configuration& configuration, const dist::Mesh& mesh, OptimizerKind kind,
          at::ScalarType dtype = at::kFloat)
      : model(seeded<Transformer>()) {
    model->to(dtype);
    configuration.apply(model, mesh);
    optimizer = make_optimizer(kind, unique_parameters(*model));
  }

  /// Trains on the same batch on every rank. Returns the losses.
  std::vector<double> train(int num_steps) {
    std::vector<double> losses;
    for (int step = 0; step < num_steps; ++step) {
      optimizer->zero_grad();
      const at::Tensor loss = forward(model, some_ids()).to(at::kFloat).pow(2).mean();
      loss.backward();
      optimizer->step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }

  /// Returns all tensors and values, whole, the same on every rank.
  StateDict whole() {
    StateDict all = state_dict(*model);
    for (StateDict::Item& item : optim_state_dict(*model, *optimizer)) {
      all.set("optim." + item.fqn, item.entry);
    }
    return all;
  }

  Transformer model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

/// Holds two state dicts of whole tensors against each other, bit by bit.
inline void expect_same_state(const StateDict& found, const StateDict& expected,
                              const std::string& what) {
  EXPECT_EQ(found.size(), expected.size()) << what;
  for (const StateDict::Item& item : expected) {
    const StateEntry* const entry = found.find(item.fqn);
    ASSERT_NE(entry, nullptr) << what << ": " << item.fqn;
    if (const auto* value = std::get_if<Value>(&item.entry)) {
      EXPECT_EQ(std::get<Value>(*entry), *value) << what << ": " << item.fqn;
    } else {
      EXPECT_TRUE(found.tensor(item.fqn).equal(expected.tensor(item.fqn)))
          << what << ": " << item.fqn;
    }
  }
}

}  // namespace tessera::test
