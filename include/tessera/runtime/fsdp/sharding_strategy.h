#pragma once

#include <ATen/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace tessera {

/// How a fully sharded module keeps its parameters, gradients and optimizer state. Names and
/// meaning are those of torch.distributed.fsdp.ShardingStrategy. Source:
/// https://arxiv.org/abs/2304.11277, section 3.
enum class ShardingStrategy {
  full_shard,          // parameters are gathered for the forward, freed, gathered for the backward
  shard_grad_op,       // parameters stay gathered until the unit's gradients are reduced
  no_shard,            // every rank holds everything; gradients are averaged
  hybrid_shard,        // full_shard over the mesh axis `shard`, replicated over `replicate`
  hybrid_shard_zero2,  // shard_grad_op over the mesh axis `shard`, replicated over `replicate`
};
inline constexpr ShardingStrategy FULL_SHARD = ShardingStrategy::full_shard;
inline constexpr ShardingStrategy SHARD_GRAD_OP = ShardingStrategy::shard_grad_op;
inline constexpr ShardingStrategy NO_SHARD = ShardingStrategy::no_shard;
inline constexpr ShardingStrategy HYBRID_SHARD = ShardingStrategy::hybrid_shard;
inline constexpr ShardingStrategy HYBRID_SHARD_ZERO2 = ShardingStrategy::hybrid_shard_zero2;

/// Returns the name in capitals: `FULL_SHARD`.
std::string_view to_string(ShardingStrategy strategy);

/// Dtypes during a pass. Between passes, so also in the optimizer, parameters keep their own dtype.
struct MixedPrecision {
  /// The dtype of gathered parameters, and so of the computation. Default: the parameters' own.
  std::optional<at::ScalarType> param_dtype{};
  /// The dtype of gradients while they are summed over the ranks. Default: `param_dtype`.
  std::optional<at::ScalarType> reduce_dtype{};
  /// The dtype to which `fully_shard` converts floating-point buffers. Default: the buffers' own.
  std::optional<at::ScalarType> buffer_dtype{};
  /// The dtype of `.grad`: the parameters' own (master_dtype), or `reduce_dtype` (low_precision).
  enum class Gradients { master_dtype, low_precision } gradients = Gradients::master_dtype;
  /// Whether `tessera::forward` casts floating-point tensors among its arguments to `param_dtype`.
  enum class Inputs { cast, keep } inputs = Inputs::cast;
};

/// What to do with a unit's gathered parameters when they are no longer needed.
enum class FreedParameters {
  freed,     // free their memory
  poisoned,  // for debugging: fill their memory with NaN, so that a use without a gather shows
};

/// When a backward all-gathers the next unit. Like torch.distributed.fsdp.BackwardPrefetch.
enum class BackwardPrefetch {
  backward_pre,   // before the current unit's gradients are computed: most overlap
  backward_post,  // after the current unit is freed: one unit less in memory
  none,           // when an operator first uses it
};
inline constexpr BackwardPrefetch BACKWARD_PRE = BackwardPrefetch::backward_pre;
inline constexpr BackwardPrefetch BACKWARD_POST = BackwardPrefetch::backward_post;

/// When a forward all-gathers the next unit.
enum class ForwardPrefetch {
  none,  // when an operator first uses it
  next,  // before the current unit computes
};

}  // namespace tessera
