#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include "tessera/base/dtype.h"
#include "tessera/runtime/dist/mesh.h"

namespace tessera::fsdp {

struct ShardedModule;

/// Makes state dicts show the parameters of a new unit as tensors of the whole model, and take them
/// from such. Hooks go to the modules that own the parameters, so that those of users further up,
/// and later ones at the same module, meet them like that.
void attach_state_dict_hooks(torch::nn::Module& module, const ShardedModule& unit,
                             const dist::Mesh& mesh);

/// Makes state dicts show buffers that a unit's mixed precision has cast in their own dtypes.
void attach_state_dict_hooks_of_cast_buffers(torch::nn::Module& module,
                                             std::map<std::string, DType> own_dtypes);

}  // namespace tessera::fsdp
