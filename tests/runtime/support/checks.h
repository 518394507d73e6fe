#pragma once

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/support/models.h"
#include "runtime/support/ranks.h"
#include "tessera/tessera.h"

namespace tessera::test {

/// Returns a new model with parameters that are equal on all ranks.
template <class Model>
Model seeded() {
  Model model{nullptr};
  with_generator([&] {
    torch::manual_seed(3);
    model = Model();
  });
  return model;
}

inline Transformer sharded_transformer(const dist::Mesh& mesh) {
  Transformer model = seeded<Transformer>();
  fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<Block>()});
  return model;
}

inline Mlp sharded_mlp(const dist::Mesh& mesh, ShardingStrategy strategy = FULL_SHARD) {
  Mlp model = seeded<Mlp>();
  fully_shard(
      *model,
      {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>(), .strategy = strategy});
  return model;
}

/// Returns two rows for an Mlp.
inline at::Tensor mlp_input() {
  return torch::linspace(-1, 1, 14).reshape({2, 7});
}

/// Returns the parameters for an optimizer, each once. (libtorch lists a tied parameter once for
/// each of its names, but an optimizer must not update it twice.)
inline std::vector<at::Tensor> unique_parameters(const torch::nn::Module& model) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : model.parameters()) {
    if (std::ranges::none_of(parameters,
                             [&](const auto& each) { return each.is_same(parameter); })) {
      parameters.push_back(parameter);
    }
  }
  return parameters;
}

inline at::Tensor some_ids() {
  return torch::arange(6).remainder(5).reshape({2, 3});
}

/// While this lives, the CPU's autocast computes in bfloat16, as with torch.autocast in Python.
class AutocastToBFloat16 {
 public:
  AutocastToBFloat16() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~AutocastToBFloat16() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  AutocastToBFloat16(const AutocastToBFloat16&) = delete;
  AutocastToBFloat16& operator=(const AutocastToBFloat16&) = delete;
};

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

inline std::vector<at::Tensor> gradients(const torch::nn::Module& model) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : model.parameters()) {
    found.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  return found;
}

inline void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                        double factor = 1) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i].defined() && b[i].defined()) << i;
    EXPECT_TRUE(torch::allclose(a[i], b[i] * factor, 1e-5, 1e-7)) << i;
  }
}

/// Gathers the gradients of a fully sharded model from all ranks. Returns whole gradients by name.
/// Leaves out a parameter if a rank has no gradient for its shard. Collective.
std::map<std::string, at::Tensor> whole_gradients(const torch::nn::Module& model,
                                                  const dist::Mesh& mesh);

/// Expects that the gradients of `sharded` are those of `unsharded` times `factor`. `tolerance`:
/// the relative tolerance; the absolute tolerance is a hundredth of it. Collective.
void expect_gradients_of(const torch::nn::Module& unsharded, const torch::nn::Module& sharded,
                         const dist::Mesh& mesh, double factor = 1, double tolerance = 1e-5);

}  // namespace tessera::test
