#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "tessera/base/tensor_meta.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::registry {

/// Describes a parameter that holds only one shard of a tensor (of an embedding table, or of a
/// parameter under `fully_shard`), or a buffer that mixed precision has cast.
struct ParameterShard {
  TensorMeta whole;  // the name is relative to the module; the dtype is that of state dicts
  /// The ranks that together hold each element once; null if each rank holds all elements.
  std::shared_ptr<dist::Group> group;
  /// Whether the module that updates the parameter in the backward has optimizer state for it.
  bool has_fused_state = false;
};

/// Stores or replaces a shard. Some calls also remove entries of destroyed parameters. Thread-safe.
void note_shard(const at::Tensor& parameter, ParameterShard shard);
/// Returns what `note_shard` has stored for the parameter, or nullopt. Thread-safe.
std::optional<ParameterShard> find_shard(const at::Tensor& parameter);

}  // namespace tessera::registry
