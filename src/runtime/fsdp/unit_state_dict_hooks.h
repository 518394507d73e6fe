#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include "tessera/base/dtype.h"

namespace tessera::fsdp {

/// Adds hooks for a new unit: state dicts get entries with the whole shapes of its parameters, and
/// loads read such entries. The hooks are on the modules that own the parameters, so that users'
/// hooks on modules above, and later hooks on the same module, see these entries. Modules in the
/// tree of `module` whose parameters are in another unit, because they are tied, get them too.
void attach_state_dict_hooks(torch::nn::Module& module);

/// Adds hooks for buffers that mixed precision has cast: state dicts get these buffers in their own
/// dtypes, those from before the cast, and loads read entries of these dtypes.
void attach_state_dict_hooks_of_cast_buffers(torch::nn::Module& module,
                                             std::map<std::string, DType> own_dtypes);

}  // namespace tessera::fsdp
