#include "runtime/dist/sync_states.h"

#include <torch/types.h>

namespace tessera::dist {

void StateSync::sync(const std::string& fqn, const at::Tensor& tensor) {
  if (!tensor.defined() || !sent_.insert(tensor.unsafeGetTensorImpl()).second) return;
  const at::NoGradGuard no_grad;
  const at::Tensor contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous();
  // Sends bytes, because some backends cannot send every dtype.
  group_.broadcast(contiguous.view({-1}).view(at::kByte), 0, fqn).wait();
  if (!contiguous.is_alias_of(tensor)) tensor.detach().copy_(contiguous);
}

}  // namespace tessera::dist
