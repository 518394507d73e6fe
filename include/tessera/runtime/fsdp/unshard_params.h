#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace tessera {
namespace fsdp {
class FlatParamHandle;
}

/// What is shown whole, to whom, and whether writes stay.
struct UnshardParamsOptions {
  /// Whether to show the parameters of all units at and below the module; else those of its own.
  bool recurse = true;
  /// Whether what is written to parameters within the scope stays.
  bool writeback = true;
  /// Whether rank 0 of the mesh alone gets whole parameters. The others show their parts.
  bool rank0_only = false;
  /// Whether whole parameters lie on the CPU, to spare a device's memory.
  bool offload_to_cpu = false;
  /// Whether gradients are shown whole as well, and written back. Else there are none in the scope.
  bool with_grads = false;
};

/// While it lives, parameters have their full shapes and their own dtype, outside of any pass: to
/// look at, to initialise, to compare, or to run a plain `forward` on without gradients.
///
/// Writes: with `writeback`, each rank keeps its part of what it wrote itself; with `rank0_only`,
/// all ranks keep their parts of what rank 0 wrote, sent unit by unit, part by part, so that it
/// takes no memory on the others. Without `writeback` they are dropped. A parameter may also be
/// given other data of its shape. Scopes nest where their options are the same.
class [[nodiscard]] UnshardedParams {
 public:
  /// Collective over the mesh. Throws: Error(invalid_argument) naming a unit that is in a pass, or
  /// in a scope with other options; or where the module is, without `recurse`, no fully sharded
  /// one.
  UnshardedParams(torch::nn::Module& module, const UnshardParamsOptions& options);
  /// Collective where rank 0's writes are sent: an exception on one rank does not keep it from
  /// that. Throws: Error(invalid_argument) naming a parameter that was given another shape;
  /// Error(io) where a peer fails; neither while an exception is on its way.
  ~UnshardedParams() noexcept(false);
  UnshardedParams(const UnshardedParams&) = delete;
  UnshardedParams& operator=(const UnshardedParams&) = delete;

 private:
  void leave_all();

  std::vector<std::shared_ptr<fsdp::FlatParamHandle>> handles_;
  std::size_t num_entered_ = 0;
  int num_uncaught_;
};

/// Shows the whole parameters of units at and below `module`, and of those that a parameter below
/// it belongs to. See UnshardedParams. Source: FullyShardedDataParallel.summon_full_params, and
/// github.com/pytorch/pytorch, change 92297; `writeback` with `rank0_only` is refused there.
inline UnshardedParams unshard_params(torch::nn::Module& module,
                                      const UnshardParamsOptions& options = {}) {
  return UnshardedParams(module, options);
}

}  // namespace tessera
