#pragma once

#include <torch/nn/module.h>

namespace tessera {

/// Scales all gradients below `root`, sharded or not, so that their norm is at most `max_norm`, and
/// returns the norm before that: the one of the whole model, whatever its strategies. `norm_type`
/// may be any positive number or infinity. torch::nn::utils::clip_grad_norm_ would see this rank's
/// parts alone, and scale each rank's by another factor: norms of sharded gradients are refused.
/// Call it between the backward and the optimizer's step. Collective over the meshes of the model's
/// units.
double clip_grad_norm_(torch::nn::Module& root, double max_norm, double norm_type = 2.0);

}  // namespace tessera
