#pragma once

#include "tessera/runtime/recompute/recompute.h"

namespace tessera {

/// Implements `recompute` with saved-tensor hooks.
std::vector<at::Tensor> recompute_saved_tensors(detail::RecomputeBody body,
                                                const std::vector<at::Tensor>& inputs,
                                                RngState rng_state);

/// Implements `recompute` with one autograd node for the whole function.
std::vector<at::Tensor> recompute_reentrant(detail::RecomputeBody body,
                                            const std::vector<at::Tensor>& inputs,
                                            RngState rng_state);

}  // namespace tessera
