#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::registry {

/// Returns what an API has run when a parameter's gradient is there; nullptr where none has. A
/// parameter that never required a gradient has nothing of autograd's that could be asked.
inline torch::autograd::PostAccumulateGradHook* gradient_hook(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

}  // namespace tessera::registry
