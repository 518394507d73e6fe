#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>

#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera {

/// Returns the parameters and buffers at and below `module`, under the names that they have in the
/// same model unsharded, in the order of the module tree; a tied parameter once, then as aliases.
///
/// FULL: copies of whole tensors, in their own dtypes. Gathered tensor by tensor, so that beside
/// the result no rank holds more than one. SHARDED and LOCAL: no copies, but the memory that
/// training goes on to change (`offload_to_cpu` copies what lies elsewhere). Works for any module,
/// with or without Tessera's APIs applied, below a root or at it, before a first pass too; and for
/// every type on every strategy and world size.
/// Collective over the model's mesh for FULL. Throws: Error(invalid_argument) within a pass or
/// unshard_params, or for `rank0_only` with another type than FULL. Source:
/// torch.distributed.fsdp, state_dict_type; github.com/pytorch/pytorch, changes 88635 to 88637,
/// 90436 and 91234.
StateDict state_dict(torch::nn::Module& module, const StateDictOptions& options = {});

/// Makes the state dicts of the subtree of `module` such of `options`, whatever the caller of
/// `state_dict` asks for, while it lives. The innermost one decides.
class [[nodiscard]] StateDictTypeScope {
 public:
  StateDictTypeScope(torch::nn::Module& module, const StateDictOptions& options);
  ~StateDictTypeScope();
  StateDictTypeScope(const StateDictTypeScope&) = delete;
  StateDictTypeScope& operator=(const StateDictTypeScope&) = delete;

 private:
  std::weak_ptr<torch::nn::Module> module_;
  std::optional<StateDictOptions> before_;
};

/// Replaces the parameters and buffers at and below `module` by those of `state_dict`: whole
/// tensors, or parts of any layout that hold at least what this rank holds. All is checked before
/// anything is replaced. Collective over the model's mesh with `rank0_only`.
/// Throws: Error(mismatch) listing everything that is missing, unexpected, or does not fit, on all
/// ranks with `rank0_only`; Error(invalid_argument) within a pass or unshard_params.
void load_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                     const LoadStateDictOptions& options = {});

/// Returns the mesh that an API was applied with at or below `module`; one of this process alone
/// where none was. Throws: Error(invalid_argument) where there are several with different worlds.
dist::Mesh mesh_of(const torch::nn::Module& module);

}  // namespace tessera
