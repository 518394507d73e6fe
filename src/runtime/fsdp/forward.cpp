#include "tessera/runtime/fsdp/forward.h"

#include <ATen/autocast_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>

#include "runtime/fsdp/pass.h"

namespace tessera {

ForwardScope::ForwardScope(torch::nn::Module& root)
    : pass_(fsdp::Pass::of(root)),
      num_uncaught_(std::uncaught_exceptions()),
      was_autocast_cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  pass_->enter_forward();
  at::autocast::set_autocast_cache_enabled(false);
}

ForwardScope::~ForwardScope() noexcept(false) {
  at::autocast::set_autocast_cache_enabled(was_autocast_cache_enabled_);
  pass_->leave_forward(std::uncaught_exceptions() > num_uncaught_, is_watched_);
}

void ForwardScope::watch(const at::Tensor& output) {
  // Skips leaves: this forward does not compute them, and they would get one more hook in each
  // forward.
  if (!output.defined() || !output.requires_grad() || output.is_leaf()) return;
  is_watched_ = true;
  output.register_hook(
      [weak = std::weak_ptr(pass_), token = pass_->graph_token()](const at::Tensor& /*gradient*/) {
        if (const auto pass = weak.lock()) pass->enter_backward();
      });
}

at::Tensor ForwardScope::cast_input(at::Tensor input) const {
  const MixedPrecision& precision = pass_->input_precision();
  if (!precision.param_dtype || precision.inputs == MixedPrecision::Inputs::keep ||
      !input.defined() || !input.is_floating_point()) {
    return input;
  }
  return input.to(*precision.param_dtype);
}

bool is_in_pass(const torch::nn::Module& module) {
  if (const auto sharded = registry::find<fsdp::ShardedModule>(module)) {
    const auto pass = sharded->pass.lock();
    return pass && pass->is_open();
  }
  return std::ranges::any_of(module.parameters(), [](const at::Tensor& parameter) {
    const auto handle = fsdp::FlatParamHandle::of(parameter);
    return handle && handle->is_in_pass();
  });
}

NoSyncScope::NoSyncScope(torch::nn::Module& root)
    : pass_(fsdp::Pass::of(root)),
      is_outermost_(pass_->set_gradients(fsdp::Pass::Gradients::keep_unsharded) ==
                    fsdp::Pass::Gradients::sync) {}

NoSyncScope::~NoSyncScope() {
  if (is_outermost_) pass_->set_gradients(fsdp::Pass::Gradients::sync);
}

void drop_unsynced_gradients(torch::nn::Module& root) {
  fsdp::Pass::of(root)->drop_unsynced_gradients();
}

}  // namespace tessera
