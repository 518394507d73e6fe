#pragma once

#include <torch/nn/module.h>

#include "tessera/runtime/registry/state_dict.h"

namespace tessera::state {

/// Returns the state dict of type SHARDED. Ignores StateDictTypeScope.
StateDict sharded_state_dict(torch::nn::Module& module);

/// Calls the load post hooks of `module` and of all modules below it, as load_state_dict does.
void run_load_post_hooks(torch::nn::Module& module);

}  // namespace tessera::state
