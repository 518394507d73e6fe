#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

namespace tessera {

/// How gradients are averaged, and what is given to all ranks.
struct ReplicateOptions {
  /// Gradients are averaged over all of its ranks. Default: this process alone.
  dist::Mesh mesh{};
  /// Gradients travel in buckets of about this size, in the order in which backwards tend to
  /// compute them. Units: bytes.
  std::int64_t bucket_nbytes = std::int64_t{25} << 20;
  /// Whether to give every rank the parameters and buffers of rank 0 first.
  enum class ModuleStates { sync, as_they_are } module_states = ModuleStates::sync;
  /// Whether every forward (tessera::forward) begins with rank 0's buffers, such as the running
  /// statistics of BatchNorm.
  enum class Buffers { broadcast, keep } buffers = Buffers::broadcast;
  /// Parameters that are left alone.
  std::vector<at::Tensor> ignored_states{};
};

/// Makes every backward average the gradients of `module` over the ranks (data parallel), in
/// buckets that travel while the rest is computed. The module keeps its type, names and `forward`.
/// A parameter that no rank has used keeps the gradient it had; of the others `.grad` is, after the
/// backward, a tensor in the bucket's memory, whatever was there before. Nests in fully_shard,
/// which then leaves its whole subtree alone; NoSyncScope holds the averaging back. Embedding
/// tables in it that `shard` was applied to are left alone in turn. Every rank runs equally many
/// backwards, one at a time, and uses some of the module in each, or anything else in a tree whose
/// forwards are watched (tessera::forward). Collective, and so is each backward; the ranks connect
/// once more, for averages in an order of their own. Call it before the optimizer is built.
/// Throws: Error(invalid_argument) where the module is not held by a shared_ptr, or it, or a module
/// in it, is sharded or replicated already; Error(mismatch) on all ranks where they have other
/// parameters to average, or buffers to share. A forward throws: Error(invalid_argument) where a
/// part of the module was replaced, added or removed since. A backward throws: Error(unsupported)
/// for sparse gradients, those with a graph (create_graph), and those of parameters that were
/// frozen when this was called; Error(io) where another rank fails. Source:
/// torch.distributed._composable.replicate (github.com/pytorch/pytorch, change 91044); Li et al.,
/// https://arxiv.org/abs/2006.15704.
void replicate(torch::nn::Module& module, const ReplicateOptions& options = {});

}  // namespace tessera
