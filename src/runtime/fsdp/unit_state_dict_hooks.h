#pragma once

#include <torch/nn/module.h>

namespace tessera::fsdp {

/// Adds hooks for a new unit: state dicts get entries with the whole shapes of its parameters, and
/// loads read such entries. The hooks are on the modules that own the parameters, so that users'
/// hooks on modules above, and later hooks on the same module, see these entries. A module in the
/// tree of `module` whose tied parameters are in another unit gets such hooks too.
void attach_state_dict_hooks(torch::nn::Module& module);

/// Adds hooks for the module's own buffers that mixed precision has cast (registry::find_shard):
/// state dicts get them in their own dtypes, those from before the cast, and loads read entries of
/// these dtypes. Does nothing if the module has these hooks.
void attach_state_dict_hooks_of_cast_buffers(torch::nn::Module& module);

}  // namespace tessera::fsdp
