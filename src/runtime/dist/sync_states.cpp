#include "runtime/dist/sync_states.h"

#include <torch/types.h>

namespace tessera::dist {

void StateSync::sync(const std::string& fqn, const at::Tensor& tensor) {
  if (!tensor.defined() || !sent_.insert(tensor.unsafeGetTensorImpl()).second) return;
  const at::NoGradGuard no_grad;
  const at::Tensor contiguous = tensor.detach().contiguous();
  group_.broadcast(contiguous, 0, fqn).wait();
  if (!contiguous.is_alias_of(tensor)) tensor.detach().copy_(contiguous);
}

}  // namespace tessera::dist
