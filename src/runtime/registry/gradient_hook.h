#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::registry {

/// Returns the post-accumulate-gradient hook of a parameter, such as `replicate` sets; nullptr if
/// there is none. A parameter that never required a gradient has no autograd metadata, so it has no
/// hook.
inline torch::autograd::PostAccumulateGradHook* gradient_hook(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

}  // namespace tessera::registry
