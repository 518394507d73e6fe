#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>

#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera {

/// Returns the parameters and buffers at and below `module`, in the order of the module tree, with
/// the keys of the unsharded model. A tied parameter has one tensor; its other names are aliases.
///
/// FULL: copies the whole tensors, in their own dtypes, one by one, so a rank holds at most one
/// whole tensor more than the result. SHARDED and LOCAL: entries share the module's memory, which
/// training changes later. Only tensors that are not contiguous are copied, and with
/// `offload_to_cpu` tensors on other devices. `module` may be any module: with or without Tessera's
/// APIs, root or not, also before the first pass. All types work for all strategies and world
/// sizes. Collective over the model's mesh for FULL. Throws: Error(invalid_argument) within a pass
/// or unshard_params, or for `rank0_only` without FULL. Source: torch.distributed.fsdp,
/// state_dict_type; github.com/pytorch/pytorch, changes 88635 to 88637, 90436 and 91234.
StateDict state_dict(torch::nn::Module& module, const StateDictOptions& options = {});

/// While this lives, `state_dict` uses these options for the subtree of `module`, not its own. The
/// innermost scope wins. Throws: Error(invalid_argument) if no shared_ptr holds `module`.
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

/// Copies `state_dict` into the parameters and buffers at and below `module`. Takes whole tensors,
/// or shards in any layout that include this rank's elements. Checks all before it replaces any.
/// Collective over the model's mesh with `rank0_only`: if one rank throws, all do, and none loads.
/// Otherwise not: if one rank throws, others may have loaded. Throws: Error(mismatch) listing what
/// is missing, unexpected or does not fit; Error(invalid_argument) in a pass or unshard_params.
void load_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                     const LoadStateDictOptions& options = {});

/// Returns the mesh with the most ranks of those that APIs at or below `module` use; if there is
/// none, a mesh of this process alone. Throws: Error(invalid_argument) if meshes of several ranks
/// differ in their world size.
dist::Mesh mesh_of(const torch::nn::Module& module);

/// How to make buffers equal that differ between ranks, such as the running statistics of
/// BatchNorm, which sees only each rank's own samples.
enum class BufferSync {
  rank0,  // all ranks get the buffers of rank 0
  mean,   // floating-point buffers become the mean over the ranks; others: as `rank0`
};

/// Makes the buffers of a model equal on all ranks of its mesh. Call it before an evaluation or a
/// save: otherwise each rank evaluates with its own buffers, and `save` saves those of rank 0.
/// Collective. Requires: no pass is open. Source: distribute_bn of timm
/// (github.com/huggingface/pytorch-image-models).
void sync_buffers(torch::nn::Module& model, BufferSync how = BufferSync::rank0);

}  // namespace tessera
