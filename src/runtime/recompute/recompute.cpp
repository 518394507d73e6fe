#include "tessera/runtime/recompute/recompute.h"

#include <torch/types.h>

#include "runtime/recompute/recomputations.h"

namespace tessera::detail {

std::vector<at::Tensor> recompute(RecomputeBody body, const std::vector<at::Tensor>& inputs,
                                  const RecomputeOptions& options) {
  if (!at::GradMode::is_enabled()) return body(inputs);
  return options.recomputation == Recomputation::reentrant
             ? recompute_reentrant(std::move(body), inputs, options.rng_state)
             : recompute_saved_tensors(std::move(body), inputs, options.rng_state);
}

}  // namespace tessera::detail
