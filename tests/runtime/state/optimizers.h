#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::test {

enum class OptimizerKind { sgd_momentum, adamw_two_groups, adam_amsgrad, adagrad, rmsprop };

inline constexpr OptimizerKind kOptimizerKinds[] = {
    OptimizerKind::sgd_momentum, OptimizerKind::adamw_two_groups, OptimizerKind::adam_amsgrad,
    OptimizerKind::adagrad, OptimizerKind::rmsprop};

std::string name_of(OptimizerKind kind);

/// Returns an optimizer. Requires: `parameters` are distinct. AdamW gets two groups: every third
/// parameter, and the others.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind,
                                                        std::vector<at::Tensor> parameters,
                                                        double lr = 0.01);

}  // namespace tessera::test
