#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/embedding_kernels/fused_optimizer.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::embedding {

/// The state of a fused optimizer for one table, or for this rank's shard of the table.
struct FusedState {
  struct Slot {
    std::string name;
    formats::StateKind kind;  // pointwise `[rows, columns]` or row-wise `[rows]`
    at::Tensor tensor;        // float32
  };
  std::vector<Slot> slots;
  std::int64_t step = 0;

  /// Returns the elements of the slot (state tensor) with this name; nullptr if there is none.
  float* data(const std::string& name) const;
};

/// Returns the state before the first step, for a shard of shape `[rows, columns]`.
FusedState initial_state(const FusedOptimizer& optimizer, std::int64_t rows, std::int64_t columns,
                         at::Device device = at::kCPU);
/// The same, but `float_memory(shape)` allocates each tensor, which is then filled with zeros.
FusedState initial_state(const FusedOptimizer& optimizer, std::int64_t rows, std::int64_t columns,
                         const std::function<at::Tensor(at::IntArrayRef)>& float_memory);

/// Returns whether the optimizer counts steps, as Adam does.
bool counts_steps(const FusedOptimizer& optimizer);

/// Throws Error(invalid_argument) for a setting of `optimizer` that is negative or not finite, or a
/// beta that is not below 1.
void check_numbers(const FusedOptimizer& optimizer);

/// Returns the settings of `optimizer` as the fields of a parameter group, named as in Python's
/// torch.optim if it has them. The field `optimizer` has the optimizer's name.
Value::Dict fields_of(const FusedOptimizer& optimizer);
/// Returns `optimizer` with the settings in `fields`. Throws: Error(mismatch) naming a field that
/// is missing, not a number, or from another optimizer; Error(invalid_argument) as `check_numbers`.
FusedOptimizer with_fields(const FusedOptimizer& optimizer, const Value::Dict& fields);

}  // namespace tessera::embedding
