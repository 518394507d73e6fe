#pragma once

#include "tessera/runtime/registry/state_dict_hooks.h"

// Hooks with which Tessera's APIs show sharded tensors as whole ones. Users' hooks meet tensors of
// the unsharded model, whether they were added before the API was applied or after it.

namespace tessera::registry {

/// As add_state_dict_post_hook, but the hook runs before all that users add to the module.
HookHandle add_first_state_dict_post_hook(torch::nn::Module& module, StateDictPostHook hook);
/// As add_load_state_dict_pre_hook, but the hook runs after all that users add to the module.
HookHandle add_last_load_state_dict_pre_hook(torch::nn::Module& module, LoadPreHook hook);

}  // namespace tessera::registry
