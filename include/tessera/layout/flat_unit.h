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

/// A flat unit: the flat parameter of a fully sharded module, as FSDP1's FlatParameter. It has the
/// module's parameters one after the other, each in row-major order, and padding at its end, so
/// that all ranks hold equally many elements. The runtime and ckpt-reshard both use the functions
/// below, so both cut a unit in the same way. Source: "PyTorch FSDP" (VLDB 2023), section 3.2.
struct FlatUnit {
  std::string name;  // fqn of the module that owns the unit; empty for the root
  DType dtype = DType::float32;
  std::vector<FlatUnitParameter> parameters;
  friend bool operator==(const FlatUnit&, const FlatUnit&) = default;
};

/// Returns a unit whose parameters (fqn and shape) are in the given order, without gaps.
FlatUnit make_flat_unit(std::string name, DType dtype,
                        std::vector<std::pair<std::string, Shape>> parameters);

/// Returns the number of elements of all parameters, without padding.
std::int64_t unpadded_numel(const FlatUnit& unit);

/// Returns the number of elements per rank, with padding: unpadded_numel / world_size, rounded up.
std::int64_t sharded_numel(const FlatUnit& unit, int world_size);

/// Returns the range of the parameter's elements (from 0) that `rank` holds; `[0, 0)` if none.
FlatRange shard_of_parameter(const FlatUnit& unit, const FlatUnitParameter& parameter, int rank,
                             int world_size);

/// Reads units from JSON, with parameters in the order of the flat parameter:
/// `{"schema": 1, "units": [{"name": "layers.0", "dtype": "float32", "parameters":
/// [{"fqn": "model.layers.0.up.weight", "shape": [10, 4]}]}]}`
/// Throws: Error(corruption) naming `path`, the place and the broken rule, also if a parameter is
/// in two units. `path` is only for messages.
std::vector<FlatUnit> flat_units_from_json(std::string_view text, const std::string& path);

}  // namespace tessera
