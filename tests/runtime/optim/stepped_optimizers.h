#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::test {

/// One of libtorch's optimizers with some options, for which there is a fused kernel.
struct OptimizerVariant {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<torch::optim::OptimizerParamGroup>)>
      make;
  /// Returns the options of the second group.
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>()> other_options;
  bool is_sgd = false;

  friend void PrintTo(const OptimizerVariant& variant, std::ostream* out) { *out << variant.name; }
};

/// Returns SGD, Adam, AdamW and Adagrad, each with every option.
std::vector<OptimizerVariant> optimizer_variants();

/// Parameters of all kinds, each held by one of two groups of an optimizer.
struct SteppedOptimizer {
  SteppedOptimizer(const OptimizerVariant& variant, at::ScalarType dtype, at::Device device);

  /// Sets the gradients of a step. Some parameters have none in some steps.
  void set_gradients(int step);

  std::vector<at::Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

/// Expects equal parameters, and equal state of each. `tolerance`: absolute and relative.
void expect_equal_progress(const SteppedOptimizer& expected, const SteppedOptimizer& found,
                           double tolerance);

/// Expects that fused steps give what the optimizer's own steps give, and so do steps of both
/// kinds in turns.
void expect_fused_steps_equal_own(const OptimizerVariant& variant, at::ScalarType dtype,
                                  at::Device device, int num_steps, double tolerance);

}  // namespace tessera::test
