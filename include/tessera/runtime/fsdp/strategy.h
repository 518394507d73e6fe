#pragma once

#include <ATen/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace tessera {

/// How a fully sharded module keeps its parameters, gradients and optimizer state. Names and
/// meaning are those of torch.distributed.fsdp.ShardingStrategy. Source:
/// https://arxiv.org/abs/2304.11277, section 3.
enum class ShardingStrategy {
  full_shard,          // parameters are gathered for a forward and again for its backward
  shard_grad_op,       // parameters stay gathered from the forward to the end of the backward
  no_shard,            // every rank holds everything; gradients are averaged
  hybrid_shard,        // full_shard over the axis `shard` of the mesh, replicated over `replicate`
  hybrid_shard_zero2,  // shard_grad_op likewise
};
inline constexpr ShardingStrategy FULL_SHARD = ShardingStrategy::full_shard;
inline constexpr ShardingStrategy SHARD_GRAD_OP = ShardingStrategy::shard_grad_op;
inline constexpr ShardingStrategy NO_SHARD = ShardingStrategy::no_shard;
inline constexpr ShardingStrategy HYBRID_SHARD = ShardingStrategy::hybrid_shard;
inline constexpr ShardingStrategy HYBRID_SHARD_ZERO2 = ShardingStrategy::hybrid_shard_zero2;

/// Returns `FULL_SHARD`.
std::string_view to_string(ShardingStrategy strategy);

/// Dtypes of a fully sharded module's work; the optimizer's parameters keep their own.
struct MixedPrecision {
  /// Of gathered parameters, and so of the computation. None: the parameters' own.
  std::optional<at::ScalarType> param_dtype{};
  /// Of gradients while they are summed over the ranks. None: `param_dtype`.
  std::optional<at::ScalarType> reduce_dtype{};
  /// Of floating-point buffers, converted once when the module is first used. None: their own.
  std::optional<at::ScalarType> buffer_dtype{};
  /// Leaves gradients in the reduced dtype instead of the parameters' own.
  enum class Gradients { master_dtype, low_precision } gradients = Gradients::master_dtype;
  /// Whether `tessera::forward` converts floating-point tensors among the root's arguments.
  enum class Inputs { cast, keep } inputs = Inputs::cast;
};

/// What becomes of a unit's gathered parameters when they are no longer needed.
enum class FreedParameters {
  freed,     // their memory is given back
  poisoned,  // for debugging: memory stays and holds NaN, so that a use without a gather shows
};

/// When a backward gathers the next unit. Names as in torch.distributed.fsdp.BackwardPrefetch.
enum class BackwardPrefetch {
  backward_pre,   // before the gradients of the current one are computed: overlaps most
  backward_post,  // after them, when the current one has been freed: one unit less in memory
  none,           // when it is used
};
inline constexpr BackwardPrefetch BACKWARD_PRE = BackwardPrefetch::backward_pre;
inline constexpr BackwardPrefetch BACKWARD_POST = BackwardPrefetch::backward_post;

/// When a forward gathers the next unit.
enum class ForwardPrefetch {
  none,  // when it is used
  next,  // before the current one computes
};

}  // namespace tessera
