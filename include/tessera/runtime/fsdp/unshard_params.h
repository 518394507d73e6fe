#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace tessera {
namespace fsdp {
class FlatParamHandle;
}

/// Which parameters to show whole, on which ranks, and whether to keep writes.
struct UnshardParamsOptions {
  /// True: each unit with a parameter at or below the module. False: only the module's own unit.
  bool recurse = true;
  /// Whether parameters keep values that are written in the scope. False: such writes are dropped.
  bool writeback = true;
  /// Whether only rank 0 of the mesh gets whole parameters. The other ranks see their shards.
  bool rank0_only = false;
  /// Whether whole parameters are on the CPU, to save device memory.
  bool offload_to_cpu = false;
  /// Whether gradients are also shown whole and, with `writeback`, written back: a gradient cleared
  /// in the scope stays cleared, a new one is kept. False: `.grad` is undefined within the scope.
  bool with_grads = false;
};

/// While this lives, parameters have their full shapes and their own dtype, outside of any pass: to
/// inspect, initialise or compare them, or to run a plain `forward` without gradients.
///
/// Writes: with `writeback` each rank keeps its own shard of what it wrote. If `rank0_only` is set
/// too, each rank keeps its shard of what rank 0 wrote; rank 0 sends these shards one by one, so
/// the other ranks need no extra memory. Without `writeback` writes are dropped. A parameter's data
/// may be replaced by data of its shape. Scopes with equal options (except `recurse`) nest.
class [[nodiscard]] UnshardedParams {
 public:
  /// Collective over the mesh. Throws: Error(invalid_argument) if a unit is in a pass or in a scope
  /// with other options, a parameter was replaced, or `recurse` is false and `module` is no unit.
  UnshardedParams(torch::nn::Module& module, const UnshardParamsOptions& options);
  /// Collective with `writeback` and `rank0_only`, also while an exception propagates on this rank.
  /// Throws: Error(invalid_argument) naming a parameter whose shape has changed; Error(io) if a
  /// peer fails. Does not throw while another exception propagates.
  ~UnshardedParams() noexcept(false);
  UnshardedParams(const UnshardedParams&) = delete;
  UnshardedParams& operator=(const UnshardedParams&) = delete;

 private:
  void leave_all();

  std::vector<std::shared_ptr<fsdp::FlatParamHandle>> handles_;
  std::size_t num_entered_ = 0;
  int num_uncaught_;
};

/// Returns UnshardedParams: by default for all units with a parameter at or below `module`. Source:
/// FullyShardedDataParallel.summon_full_params. (PyTorch refuses `writeback` with `rank0_only`:
/// github.com/pytorch/pytorch, change 92297. Tessera supports it.)
inline UnshardedParams unshard_params(torch::nn::Module& module,
                                      const UnshardParamsOptions& options = {}) {
  return UnshardedParams(module, options);
}

}  // namespace tessera
