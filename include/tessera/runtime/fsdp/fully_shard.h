#pragma once

#include <c10/core/Stream.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <utility>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"
#include "tessera/layout/region.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/fsdp/forward.h"
#include "tessera/runtime/fsdp/policy.h"
#include "tessera/runtime/fsdp/sharding_strategy.h"

namespace tessera {

/// Where this rank's shards are between passes (a pass is a forward and its backward).
enum class Offload {
  none,    // on the device of the parameters
  params,  // on the CPU, with their gradients, so that the optimizer steps there
};

/// How to shard a module. Must be equal on all ranks, except `device`.
struct FullyShardOptions {
  /// FULL_SHARD and SHARD_GRAD_OP shard over the mesh's only axis. Hybrid strategies shard over the
  /// axis `shard` and copy the shards over `replicate`. Default: this process alone.
  dist::Mesh mesh{};
  /// Which modules below `module` become units, each gathered on its own. Default: only `module`.
  AnyFsdpPolicy policy{};
  /// What a rank holds between passes, and whether it frees a unit's full parameters after forward.
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  /// Dtypes of computation, reduction and buffers. Default: the parameters' and the buffers' own.
  MixedPrecision mixed_precision{};
  /// Modules that fully_shard ignores, with all parameters at and below them.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules{};
  /// Parameters that fully_shard ignores.
  std::vector<at::Tensor> ignored_states{};
  /// Whether to all-gather the next unit while the current unit computes. This holds one more unit
  /// in memory. The next unit is the one that came next in the last pass of the same kind (training
  /// or inference), so the first pass of each kind prefetches nothing.
  ForwardPrefetch forward_prefetch = ForwardPrefetch::none;
  /// When a backward all-gathers the next unit. Which unit is next: see `forward_prefetch`.
  BackwardPrefetch backward_prefetch = BackwardPrefetch::backward_pre;
  /// Bounds the memory of a device that runs behind the host (GPU). While it may still use two
  /// units that the host has freed, the host waits for the older one before the next all-gather.
  bool limit_all_gathers = true;
  /// What to do with gathered parameters after use; `poisoned` is for debugging.
  FreedParameters freed_parameters = FreedParameters::freed;
  /// Where this rank's shards and their gradients are between passes.
  Offload offload = Offload::none;
  /// Gives values to a module's own parameters and buffers that were on the meta device. Required
  /// if there are any. fully_shard calls it once for each module that has such tensors, after
  /// giving them uninitialised memory on `device` and before sharding them. It does so unit by
  /// unit, so that no rank ever holds all parameters.
  std::function<void(torch::nn::Module&)> param_init_fn{};
  at::Device device = at::kCPU;  // for parameters and buffers from the meta device
  /// Whether fully_shard first sends the parameters and buffers of rank 0 to all ranks (`sync`).
  enum class ModuleStates { as_they_are, sync } module_states = ModuleStates::as_they_are;
};

/// Shards the parameters of `module` over the ranks of a mesh, in place. The module keeps its type,
/// parameter names and `forward`; there is no wrapper. Between passes `tessera::parameters(module)`
/// are this rank's shards. In a pass (`tessera::forward`, backward) parameters have full shapes.
/// Modules below `module` that are sharded already keep their units. The other parameters become
/// this module's unit: a flat parameter per dtype, in the order of the module tree. Shard inner
/// modules before outer ones, or let `policy` do so. A frozen parameter is sharded and gathered
/// too, but gets no gradient. You may freeze and unfreeze parameters between passes.
///
/// Create the optimizer of torch::optim after this call, with the shards (in groups:
/// `parameter_groups`). An optimizer without state may exist already (not Adagrad, which creates
/// its state at once). Do not use LBFGS: its dot products would only see this rank's shards.
/// Collective over the mesh if `module_states` is `sync`, otherwise not collective.
/// Throws:
/// - Error(invalid_argument) if no shared_ptr holds the module, or if the axes of the mesh do not
///   fit the strategy;
/// - Error(invalid_argument) if the module is already sharded or replicated, or is part of the unit
///   of an outer module;
/// - Error(invalid_argument) if its parameters are on different devices, have gradients, or are
///   managed by `replicate`;
/// - Error(invalid_argument) if it has meta tensors and `param_init_fn` is not set;
/// - Error(unsupported) if a parameter is not floating-point or not a leaf, or if a module updates
///   its own parameters (FusedEmbeddingBagCollection).
///
/// Source: torch.distributed._composable.fully_shard over FSDP1 with use_orig_params=True
/// (github.com/pytorch/pytorch, changes 88450, 90933, 91044).
void fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

/// Describes a flat parameter: a unit's parameters of one dtype, concatenated and padded.
struct FlatParameterInfo {
  /// A parameter and its place. A tied weight is listed once.
  struct Parameter {
    std::string fqn;  // below the fully sharded module
    Shape shape;
    std::int64_t offset = 0;  // elements, in the flat parameter
    std::int64_t numel = 0;
  };
  std::string module_fqn;  // below the module that `handles` got; empty for that module itself
  DType dtype = DType::float32;
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  std::vector<Parameter> parameters;
  std::map<std::string, std::string> shared;  // other fqn of a tied weight -> fqn in `parameters`
  std::int64_t unpadded_numel = 0;            // up to the end of the last parameter
  std::int64_t sharded_numel = 0;             // of each rank, with padding
  bool is_unsharded = false;                  // true while parameters are all-gathered in a pass
};

/// Returns the flat parameters of all fully sharded modules at and below `module`, in the order of
/// the module tree. Not collective.
std::vector<FlatParameterInfo> handles(const torch::nn::Module& module);

/// Returns the flat parameter that contains `parameter`, or std::nullopt. Not collective. Before
/// the first pass, `module_fqn` is relative to the module that fully_shard got; later, to the root.
std::optional<FlatParameterInfo> flat_param_of(const at::Tensor& parameter);

/// Returns the fully sharded modules at and below `module` with their names, in the order of the
/// module tree. Not collective.
std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> fsdp_modules(
    const torch::nn::Module& module);

/// Sets whether `module`'s unit frees its full parameters after its forward (as FULL_SHARD does) or
/// keeps them until its backward (as SHARD_GRAD_OP does). `recurse`: also for the units inside
/// `module`. Takes effect at once. Not collective, but all ranks must make the same calls. Throws:
/// Error(invalid_argument) if the module is not fully sharded.
void set_reshard_after_forward(torch::nn::Module& module, bool reshard_after_forward,
                               bool recurse = true);

/// The modules and parameters that the first forward over a root used, in the order of first use.
/// Source: torch.distributed.fsdp._trace_utils (github.com/pytorch/pytorch, change 89917).
struct ExecutionInfo {
  /// The used parameters of one unit.
  struct ParamUsageInfo {
    std::string module_fqn;           // of the fully sharded module, relative to the root
    std::vector<std::string> params;  // names below it, in order of first use
  };
  std::vector<std::string> module_forward_order;  // fully sharded modules, relative to the root
  std::vector<std::string> param_forward_order;   // parameters, relative to the root
  std::vector<ParamUsageInfo> module_to_param_usage_infos;
};

/// Returns the modules and parameters that `root`'s first forward used. Empty before that forward.
/// Not collective.
ExecutionInfo execution_info(const torch::nn::Module& root);

/// A stream of a device, and the name of its purpose.
struct NamedStream {
  std::string name;
  c10::Stream stream;
};

/// Returns the streams of passes over `root`, so that the caller can profile them or wait for them:
/// `default` (the current stream when the first pass began), `unshard` (all-gathers), `pre_unshard`
/// (casts and copies before them), `post_backward` (reductions), `all_reduce` (reductions over the
/// replicas of hybrid strategies). On the CPU all are the same. Empty before the first pass. Not
/// collective. Source: torch.distributed.fsdp, `_init_streams` (github.com/pytorch/pytorch, change
/// 90611).
std::vector<NamedStream> streams(const torch::nn::Module& root);

/// Returns the collectives of the open or last pass over `root`, in order: `unshard layers.0`,
/// `reduce layers.0`. If there is one rank: only those of cast or offloaded units. Not collective.
std::vector<std::string> recorded_order(const torch::nn::Module& root);

namespace detail {

/// While this lives, operators of this thread create tensors on the meta device: with shapes and
/// dtypes, without memory.
class [[nodiscard]] MetaDeviceScope {
 public:
  MetaDeviceScope();
  ~MetaDeviceScope();
  MetaDeviceScope(const MetaDeviceScope&) = delete;
  MetaDeviceScope& operator=(const MetaDeviceScope&) = delete;
};

}  // namespace detail

/// Calls `make` and returns its result, with all new tensors on the meta device: a model of any
/// size, for fully_shard to allocate unit by unit. `make` must not read tensor values. Like `with
/// torch.device("meta")` in Python.
template <class Make>
auto on_meta_device(Make&& make) {
  const detail::MetaDeviceScope scope;
  return std::forward<Make>(make)();
}

/// Scales all `.grad`s at and below `root`, sharded or not, so that their norm is at most
/// `max_norm`; a smaller norm stays. Returns the norm of the whole model before scaling, for every
/// strategy. Call it between backward and optimizer step. `norm_type`: a positive number or
/// infinity. If the norm is NaN, all gradients become NaN, as in PyTorch. Gradients that nothing
/// averages (of ignored_states) count with the largest norm that a rank has of them. Do not use
/// torch::nn::utils::clip_grad_norm_ instead: it would see only this rank's shards, so it throws.
/// Collective over the meshes of sharded units and tables; if there are ignored parameters, over
/// the model's mesh too. Throws: Error(invalid_argument) unless
/// `norm_type > 0` and `max_norm >= 0`, or within unshard_params.
double clip_grad_norm_(torch::nn::Module& root, double max_norm, double norm_type = 2.0);

/// A module holder that calls fully_shard on its module when the holder is constructed. The holder
/// is not a module itself, so parameter names do not change. The module is the same as after
/// `fully_shard(*module, options)`. `Sub` is a module class or its TORCH_MODULE holder.
///
///   struct NetImpl : torch::nn::Module {
///     NetImpl() { block = register_module("block", Sharded(Block(8), options)); }
///     using Sharded = FullyShardedDataParallel<Block>;
///     Sharded block{nullptr};
///   };
///
/// Copies of the holder share the module. Source: torch.distributed.fsdp.FullyShardedDataParallel.
template <class Sub>
class FullyShardedDataParallel
    : public torch::nn::ModuleHolder<typename detail::ModuleImpl<Sub>::Type> {
 public:
  /// The class of the module.
  using Impl = typename detail::ModuleImpl<Sub>::Type;
  /// The plain holder of that class.
  using Holder = torch::nn::ModuleHolder<Impl>;

  FullyShardedDataParallel(std::nullptr_t) : Holder(nullptr) {}
  /// Shards the module. Throws as fully_shard; collective as fully_shard.
  FullyShardedDataParallel(std::shared_ptr<Impl> module, const FullyShardOptions& options)
      : Holder(std::move(module)) {
    fully_shard(*this->ptr(), options);
  }
  FullyShardedDataParallel(const Holder& module, const FullyShardOptions& options)
      : FullyShardedDataParallel(module.ptr(), options) {}
  /// Holds a module that is sharded already, such as one that `register_module` returned.
  FullyShardedDataParallel(std::shared_ptr<Impl> module) : Holder(std::move(module)) {}

  /// Calls the module's forward. If the module is in an open pass, the call is part of that pass.
  /// Otherwise the call opens a new pass, whose root is the module (`tessera::forward`).
  template <class... Args>
  auto operator()(Args&&... args) {
    if (is_in_pass(*this->ptr())) return this->ptr()->forward(std::forward<Args>(args)...);
    return tessera::forward(*this->ptr(), std::forward<Args>(args)...);
  }
};

}  // namespace tessera
