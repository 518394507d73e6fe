#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include "tessera/base/dtype.h"
#include "tessera/runtime/dist/mesh.h"

namespace tessera::fsdp {

struct ShardedModule;

/// Adds hooks by which state dicts have entries with whole shapes for a new unit's parameters, and
/// load from such entries. The hooks are on the modules that own the parameters, so that users'
/// hooks on modules above, and later hooks on the same module, see these entries.
void attach_state_dict_hooks(torch::nn::Module& module, const ShardedModule& unit,
                             const dist::Mesh& mesh);

/// Adds hooks that give state dicts the buffers in the dtypes that they had before mixed precision
/// cast them.
void attach_state_dict_hooks_of_cast_buffers(torch::nn::Module& module,
                                             std::map<std::string, DType> own_dtypes);

}  // namespace tessera::fsdp
