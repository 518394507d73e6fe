#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

namespace tessera {

/// How gradients are averaged, and what rank 0 sends to the other ranks.
struct ReplicateOptions {
  /// Gradients are averaged over all ranks of this mesh. Default: this process alone.
  dist::Mesh mesh{};
  /// Gradients are sent in buckets. A bucket of this many bytes takes no further parameter; the
  /// last ones are smaller. Their order is that in which a backward usually computes gradients.
  std::int64_t bucket_nbytes = std::int64_t{25} << 20;
  /// Whether `replicate` first sends the parameters and buffers of rank 0 to all ranks (`sync`).
  enum class ModuleStates { sync, as_they_are } module_states = ModuleStates::sync;
  /// Whether each forward (tessera::forward) in training mode first sends rank 0's buffers, such as
  /// BatchNorm's running statistics, to all ranks. A forward in a NoSyncScope does not send them.
  enum class Buffers { broadcast, keep } buffers = Buffers::broadcast;
  /// Parameters that are neither sent nor averaged. A save writes rank 0's copy of unsharded ones.
  std::vector<at::Tensor> ignored_states{};
};

/// Averages the gradients of `module` over the ranks in every backward (data parallel, DDP), in
/// buckets that are sent while the backward runs. The module keeps its type, names and `forward`.
/// After a backward, `.grad` of a parameter that any rank used is part of the bucket's memory; a
/// parameter that no rank used keeps its old gradient. While a backward that averages runs, `.grad`
/// is undefined, also if an earlier backward has set it. NoSyncScope postpones the averaging.
/// `replicate` ignores tables that `shard` has sharded. A later fully_shard of a module around
/// `module` ignores `module`. Call `replicate` before you create the optimizer.
///
/// Collective, and so is each backward; both may be mixed with other collectives in any order. All
/// ranks must run equally many backwards, one at a time. Each backward must use at least one
/// parameter of the module on each rank, unless the forward was run by tessera::forward.
/// Throws:
/// - Error(invalid_argument) if no shared_ptr holds the module, or if the module or a module in it
///   is already sharded or replicated;
/// - Error(invalid_argument) if a parameter is on the meta device, has a graph, or is managed by
///   another module (a tied weight);
/// - Error(unsupported) if a module updates its own parameters;
/// - Error(mismatch) on all ranks if names, shapes or dtypes of parameters or buffers differ.
///
/// tessera::forward throws Error(invalid_argument) if a parameter of the module was replaced, added
/// or removed. The module's own `forward` does not check this.
///
/// A backward throws:
/// - Error(unsupported) for a sparse gradient, a gradient with a graph (create_graph), or a
///   gradient of a parameter that was frozen when `replicate` was called;
/// - Error(io) if another rank fails.
///
/// Source: torch.distributed._composable.replicate (github.com/pytorch/pytorch, change 91044); Li
/// et al., https://arxiv.org/abs/2006.15704.
void replicate(torch::nn::Module& module, const ReplicateOptions& options = {});

}  // namespace tessera
