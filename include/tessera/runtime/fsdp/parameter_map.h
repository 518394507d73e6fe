#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/layout/region.h"
#include "tessera/runtime/fsdp/fully_shard.h"

// Maps parameter names (FQNs) to places in flat parameters, and back.

namespace tessera {

/// Where a parameter is, and which rank holds which elements of it.
struct ParameterLocation {
  FlatParameterInfo flat_param;
  std::int64_t offset = 0;  // elements, in the flat parameter
  std::int64_t numel = 0;
  Shape shape;
  std::vector<FlatRange> held;  // each rank's elements (hybrid: along axis `shard`; NO_SHARD: one)
};

/// Returns the place of the parameter named `fqn` below `module`; any name of a tied weight will
/// do. Returns std::nullopt if the units at and below `module` have no parameter of this name. Not
/// collective. Source: github.com/pytorch/pytorch, change 89899.
std::optional<ParameterLocation> flat_param_of(const torch::nn::Module& module,
                                               const std::string& fqn);

/// A parameter and the index of one of its elements.
struct ElementOfParameter {
  std::string fqn;         // FlatParameterInfo::module_fqn, then the parameter's own name
  std::int64_t index = 0;  // row-major
  friend bool operator==(const ElementOfParameter&, const ElementOfParameter&) = default;
};

/// Returns the parameter and element at `offset` of a flat parameter; std::nullopt if `offset` is
/// in the padding or beyond the end.
std::optional<ElementOfParameter> element_at(const FlatParameterInfo& flat_param,
                                             std::int64_t offset);

}  // namespace tessera
