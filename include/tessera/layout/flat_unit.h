#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"
#include "tessera/layout/region.h"

namespace tessera {

/// A parameter's place in a flat parameter. Units: elements.
struct FlatUnitParameter {
  std::string fqn;
  Shape shape;
  std::int64_t offset = 0;  // of its first element in the unpadded flat parameter
  friend bool operator==(const FlatUnitParameter&, const FlatUnitParameter&) = default;
};

/// The flat parameter of a fully sharded module: its parameters, one after the other in row-major
/// order, padded at the end so that every rank holds the same number of elements. The runtime and
/// the offline tool share the functions below, so both cut a unit the same way.
/// Source: "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023), 3.2.
struct FlatUnit {
  std::string name;  // fqn of the module that owns it; empty for the root
  DType dtype = DType::float32;
  std::vector<FlatUnitParameter> parameters;
  friend bool operator==(const FlatUnit&, const FlatUnit&) = default;
};

/// Returns a unit with its parameters' offsets filled in, in the given order, without gaps.
FlatUnit make_flat_unit(std::string name, DType dtype,
                        std::vector<std::pair<std::string, Shape>> parameters);

/// Returns the elements of all parameters, without padding.
std::int64_t unpadded_numel(const FlatUnit& unit);

/// Returns the elements that each rank holds: unpadded_numel divided by the ranks, rounded up.
std::int64_t sharded_numel(const FlatUnit& unit, int world_size);

/// Returns what `rank` holds of a parameter of the unit, as a range of that parameter's elements;
/// empty where it holds nothing.
FlatRange shard_of_parameter(const FlatUnit& unit, const FlatUnitParameter& parameter, int rank,
                             int world_size);

/// Reads units from JSON, in which each parameter comes in its place in the flat parameter:
/// `{"schema": 1, "units": [{"name": "layers.0", "dtype": "float32", "parameters":
/// [{"fqn": "model.layers.0.up.weight", "shape": [10, 4]}]}]}`
/// Throws: Error(corruption) that names `path`, the unit and the broken rule; a parameter may be in
/// one unit only.
std::vector<FlatUnit> flat_units_from_json(std::string_view text, const std::string& path);

}  // namespace tessera
