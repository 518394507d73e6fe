#pragma once

#include <cstdint>

#include "tessera/runtime/registry/state_dict_hooks.h"

// Hooks with which Tessera's APIs show sharded tensors as whole ones. Users' hooks meet tensors of
// the unsharded model, whether they were added before the API was applied or after it.

namespace tessera::registry {

/// Returns whether add_first_state_dict_post_hook has added the post hook with this number.
bool is_own_post_hook(std::uint64_t number);

/// As add_state_dict_post_hook, but the hook runs before all that users add to the module.
HookHandle add_first_state_dict_post_hook(torch::nn::Module& module, StateDictPostHook hook);
/// As add_load_state_dict_pre_hook, but the hook runs after all that users add to the module.
HookHandle add_last_load_state_dict_pre_hook(torch::nn::Module& module, LoadPreHook hook);

}  // namespace tessera::registry
