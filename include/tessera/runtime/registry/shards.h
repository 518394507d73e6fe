#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "tessera/base/tensor_meta.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::registry {

/// A parameter that is this rank's shard of a tensor: of a table, or of a unit of `fully_shard`.
struct ParameterShard {
  TensorMeta whole;  // named within the module that has it
  /// Of the ranks that hold the shards, none an element twice; null: all hold all.
  std::shared_ptr<dist::Group> group;
};

/// Notes it for as long as the parameter lives. Thread-safe.
void note_shard(const at::Tensor& parameter, ParameterShard shard);
/// Returns nothing for parameters that were not noted. Thread-safe.
std::optional<ParameterShard> find_shard(const at::Tensor& parameter);

}  // namespace tessera::registry
