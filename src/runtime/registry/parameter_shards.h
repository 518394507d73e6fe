#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "tessera/base/tensor_meta.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::registry {

/// A parameter that is one shard of a tensor: of a table, or of a unit of `fully_shard`.
struct ParameterShard {
  TensorMeta whole;  // the name is relative to the parameter's module
  /// The ranks that together hold each element once; null if each rank holds all elements.
  std::shared_ptr<dist::Group> group;
};

/// Stores `shard` until the parameter dies. Thread-safe.
void note_shard(const at::Tensor& parameter, ParameterShard shard);
/// Returns nullopt if `note_shard` was not called for the parameter. Thread-safe.
std::optional<ParameterShard> find_shard(const at::Tensor& parameter);

}  // namespace tessera::registry
