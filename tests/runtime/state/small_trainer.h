#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/support/checks.h"

namespace tessera::test {

/// Two fully sharded layers under AdamW, and a number in the state.
struct SmallTrainer {
  explicit SmallTrainer(const dist::Mesh& mesh, int width = 13)
      : model(sharded(mesh, width)), optimizer(model->parameters()) {
    forward(model, torch::ones({2, 7})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }

  TrainState state() { return TrainState(model, optimizer).with("number", number); }

  /// Returns this rank's shards of the optimizer's state, except the counts of steps.
  std::vector<at::Tensor> moments() {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& parameter : model->parameters()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;  // this rank has no part of the parameter
      const auto& its_state = static_cast<torch::optim::AdamWParamState&>(*found->second);
      tensors.push_back(its_state.exp_avg());
      tensors.push_back(its_state.exp_avg_sq());
    }
    return tensors;
  }

  /// Sets every element to the number, so that a load shows which save it came from.
  void fill(std::int64_t its_number) {
    const at::NoGradGuard no_grad;
    number = its_number;
    for (at::Tensor& tensor : model->parameters()) tensor.fill_(number);
    for (at::Tensor& tensor : moments()) tensor.fill_(number);
  }

  torch::nn::Sequential model;
  torch::optim::AdamW optimizer;
  std::int64_t number = 0;

 private:
  static torch::nn::Sequential sharded(const dist::Mesh& mesh, int width) {
    torch::nn::Sequential layers;
    with_generator([&] {
      torch::manual_seed(3);
      layers->push_back(torch::nn::Linear(7, width));
      layers->push_back(torch::nn::Linear(width, width));
    });
    fully_shard(*layers, {.mesh = mesh});
    return layers;
  }
};

inline void expect_filled(const std::vector<at::Tensor>& tensors, std::int64_t number,
                          const std::string& what) {
  EXPECT_FALSE(tensors.empty()) << what;
  EXPECT_TRUE(std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
    return tensor.detach().eq(number).all().item<bool>();
  })) << what;
}

}  // namespace tessera::test
