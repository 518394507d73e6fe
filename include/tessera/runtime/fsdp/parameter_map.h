#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/layout/region.h"
#include "tessera/runtime/fsdp/fully_shard.h"

// The map between names of parameters (FQNs) and flat parameters, both ways.

namespace tessera {

/// Where a parameter lies, and who holds what of it.
struct ParameterLocation {
  FlatParameterInfo flat_param;
  std::int64_t offset = 0;  // elements, in the flat parameter
  std::int64_t numel = 0;
  Shape shape;
  std::vector<FlatRange> held;  // by rank of the shard group: elements of the parameter, row-major
};

/// Returns where the parameter that is called `fqn` below `module` lies; a tied parameter by any of
/// its names. Nothing for a name of none, or of one that is not sharded. Not collective. Source:
/// github.com/pytorch/pytorch, change 89899.
std::optional<ParameterLocation> flat_param_of(const torch::nn::Module& module,
                                               const std::string& fqn);

/// An element by the parameter that it belongs to.
struct ElementOfParameter {
  std::string fqn;         // below the module that the flat parameter's own is named after
  std::int64_t index = 0;  // row-major
  friend bool operator==(const ElementOfParameter&, const ElementOfParameter&) = default;
};

/// Returns what lies at `offset` elements in a flat parameter; nothing in its padding.
std::optional<ElementOfParameter> element_at(const FlatParameterInfo& flat_param,
                                             std::int64_t offset);

}  // namespace tessera
