#pragma once

#include <c10/core/Stream.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"
#include "tessera/layout/region.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/fsdp/policy.h"
#include "tessera/runtime/fsdp/strategy.h"

namespace tessera {

/// Where this rank's parts lie between passes.
enum class Offload {
  none,    // on the device of the parameters
  params,  // on the CPU, with their gradients, so that the optimizer steps there
};

/// How a module is sharded. To be the same on all ranks, but for `device`.
struct FullyShardOptions {
  /// Over its axis `shard` parameters are sharded; over `replicate`, where there is one, they are
  /// replicated (hybrid strategies). Default: this process alone.
  dist::Mesh mesh{};
  /// Which modules below become units of their own. None: no further ones.
  AnyFsdpPolicy policy{};
  /// What a rank holds between passes, and whether a unit is freed after its forward.
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  /// Dtypes of computation, reduction and buffers. Default: the parameters' own.
  MixedPrecision mixed_precision{};
  /// Modules whose parameters, and those below them, are left alone.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules{};
  /// Parameters that are left alone.
  std::vector<at::Tensor> ignored_states{};
  /// When the next unit is gathered, as the pass before used them. Prefetching gathers it while the
  /// current one computes, and holds one unit more in memory.
  ForwardPrefetch forward_prefetch = ForwardPrefetch::none;
  /// See `forward_prefetch`.
  BackwardPrefetch backward_prefetch = BackwardPrefetch::backward_pre;
  /// On a device that runs behind the host: whether the host waits before a gather until all but
  /// the last two parameters that it freed are free there too, so that gathers do not pile up in
  /// memory.
  bool limit_all_gathers = true;
  /// What becomes of gathered parameters after use; `poisoned` is for debugging.
  FreedParameters freed_parameters = FreedParameters::freed;
  /// Where this rank's parts and their gradients lie between passes.
  Offload offload = Offload::none;
  /// Called for each module that has parameters or buffers of its own on the meta device, when they
  /// have been given memory on `device`, uninitialised, and before they are sharded: gives them
  /// their values. One unit after the other, so that no rank ever holds all parameters at once.
  std::function<void(torch::nn::Module&)> param_init_fn{};
  at::Device device = at::kCPU;  // of parameters that come from the meta device
  /// Whether to give every rank the parameters and buffers of rank 0 first, each sent once.
  enum class ModuleStates { as_they_are, sync } module_states = ModuleStates::as_they_are;
};

/// Shards the parameters of `module` over the ranks of a mesh, in place: the module keeps its type
/// and its names, needs no wrapper, and its `forward` stays as it is. Between passes
/// `tessera::parameters(module)` are this rank's parts, to be given to an optimizer of torch::optim
/// (in groups: `parameter_groups`); a pass (`tessera::forward`) shows them whole. Modules below
/// that are sharded already keep their own units; the rest of the parameters become this module's,
/// flat, in the order of the module tree. Composable: apply it from the inside out, or let `policy`
/// do so. Collective over the mesh where module states are synced. Call it before the optimizer is
/// built; one that keeps no state yet may be there (not Adagrad, which makes its own at once).
/// LBFGS is none for parts of parameters: its dot products would be those of each rank's alone.
/// Throws: Error(invalid_argument) where the module is not held by a shared_ptr, is sharded
/// already, is a part of a unit around it, mixes devices, has gradients, meta tensors and no
/// `param_init_fn`, or parameters that replicate has taken over;
/// Error(unsupported) for a dtype that cannot be flattened. Source:
/// torch.distributed._composable.fully_shard over FSDP1 with use_orig_params=True
/// (github.com/pytorch/pytorch, changes 88450, 90933, 91044).
void fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

/// A flat parameter, as data.
struct FlatParameterInfo {
  /// A parameter and its place. A tied one comes once.
  struct Parameter {
    std::string fqn;  // below the fully sharded module
    Shape shape;
    std::int64_t offset = 0;  // elements, in the flat parameter
    std::int64_t numel = 0;
  };
  std::string module_fqn;  // below the module that was asked; empty for itself
  DType dtype = DType::float32;
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  std::vector<Parameter> parameters;
  std::map<std::string, std::string> shared;  // fqn of a tied parameter -> that of the one it is
  std::int64_t unpadded_numel = 0;
  std::int64_t sharded_numel = 0;  // of each rank, padding included
  bool is_unsharded = false;       // gathered right now
};

/// Returns the flat parameters of all fully sharded modules at and below `module`, in the order of
/// the module tree. Not collective.
std::vector<FlatParameterInfo> handles(const torch::nn::Module& module);

/// Returns the flat parameter that a parameter is a part of, with `module_fqn` below its root once
/// a pass has begun; nothing for one that is not sharded. Not collective.
std::optional<FlatParameterInfo> flat_param_of(const at::Tensor& parameter);

/// Returns the fully sharded modules at and below `module` by their names below it, in the order of
/// the module tree. Not collective.
std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> fsdp_modules(
    const torch::nn::Module& module);

/// Sets whether `module`'s unit is freed after its forward, as FULL_SHARD does, or kept up to its
/// backward, as SHARD_GRAD_OP does; `recurse`: those of the units in it too. Takes effect at once.
/// Not collective, but to be the same on all ranks. Throws: Error(invalid_argument) where the
/// module is not fully sharded.
void set_reshard_after_forward(torch::nn::Module& module, bool reshard_after_forward,
                               bool recurse = true);

/// What the first forward over a root used, in order. Source: torch.distributed.fsdp._trace_utils
/// (github.com/pytorch/pytorch, change 89917).
struct ExecutionInfo {
  /// The parameters of one unit that were used.
  struct ParamUsageInfo {
    std::string module_fqn;           // of the fully sharded module
    std::vector<std::string> params;  // names below it, in the order of their first use
  };
  std::vector<std::string> module_forward_order;  // fully sharded modules
  std::vector<std::string> param_forward_order;   // names below the root
  std::vector<ParamUsageInfo> module_to_param_usage_infos;
};

/// Returns the record of the first forward over `root`; empty before it. Works on one rank too.
/// Not collective.
ExecutionInfo execution_info(const torch::nn::Module& root);

/// A stream of a device, and what it is for.
struct NamedStream {
  std::string name;
  c10::Stream stream;
};

/// Returns the streams that passes over `root` work on, to find them in a profile or to wait for
/// them: `default` (the one that was current when the first pass began), `unshard` (gathers),
/// `pre_unshard` (casts and copies before them), `post_backward` (reductions), `all_reduce` (those
/// over the replicas of hybrid strategies). On CPU all are the one stream there is. Empty before
/// the first pass. Not collective. Source: torch.distributed.fsdp, `_init_streams`
/// (github.com/pytorch/pytorch, change 90611).
std::vector<NamedStream> streams(const torch::nn::Module& root);

/// Returns the collectives of the last pass over `root`, or of the one that is open, in order:
/// `unshard layers.0`, `reduce layers.0`. Empty on one rank. Not collective.
std::vector<std::string> recorded_order(const torch::nn::Module& root);

}  // namespace tessera
