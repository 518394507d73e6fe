#pragma once

#include <torch/nn/module.h>

namespace tessera {

/// Scales all gradients below `root`, sharded or not, so that their norm is at most `max_norm`.
/// Returns the norm of the whole model before scaling, for every strategy. `norm_type`: a positive
/// number or infinity. Do not use torch::nn::utils::clip_grad_norm_: it would see only this rank's
/// parts, so it throws. Call it between backward and optimizer step. Collective over the meshes of
/// sharded units and tables. Throws: Error(invalid_argument) unless `norm_type > 0` and `max_norm
/// >= 0`.
double clip_grad_norm_(torch::nn::Module& root, double max_norm, double norm_type = 2.0);

}  // namespace tessera
