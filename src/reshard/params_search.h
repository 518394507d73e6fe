#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/shape.h"

// Finds which tensors are the parameters of an optimizer that has only numbers, by the shapes of
// its state.
namespace tessera::reshard {

/// A parameter that an optimizer knows only by a number, with the shape of its state.
struct NumberedParam {
  std::string number;
  std::optional<Shape> shape;  // none: no state of the number surely has its shape
  bool is_flat = false;        // the state is a vector of the parameter's elements, as FSDP1 has it
};

/// A tensor that may be a parameter.
struct ParamCandidate {
  std::string name;
  Shape shape;
};

/// Returns, for each parameter of all groups, one after another, the index of its candidate.
/// Requires: `candidates` are in the order of the state dict, which each group follows too. Throws:
/// Error(mismatch) with `path` if no choice fits, if several fit, or if the search takes too long.
/// Cost: limited to 200,000 states of the search.
std::vector<std::size_t> params_in_order(const std::vector<std::vector<NumberedParam>>& groups,
                                         std::span<const ParamCandidate> candidates,
                                         const std::string& path);

/// As params_in_order, for candidates whose order is not known: the shapes alone must leave one
/// choice.
std::vector<std::size_t> params_by_shape(const std::vector<std::vector<NumberedParam>>& groups,
                                         std::span<const ParamCandidate> candidates,
                                         const std::string& path);

}  // namespace tessera::reshard
