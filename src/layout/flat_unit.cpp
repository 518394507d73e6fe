#include "tessera/layout/flat_unit.h"

#include <algorithm>
#include <utility>

#include "tessera/base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera {

FlatUnit make_flat_unit(std::string name, DType dtype,
                        std::vector<std::pair<std::string, Shape>> parameters) {
  FlatUnit unit{std::move(name), dtype, {}};
  std::int64_t offset = 0;
  for (auto& [fqn, shape] : parameters) {
    const std::int64_t numel = numel_of(shape);
    unit.parameters.push_back({std::move(fqn), std::move(shape), offset});
    offset += numel;
  }
  return unit;
}

std::int64_t unpadded_numel(const FlatUnit& unit) {
  if (unit.parameters.empty()) return 0;
  const FlatUnitParameter& last = unit.parameters.back();
  return last.offset + numel_of(last.shape);
}

std::int64_t sharded_numel(const FlatUnit& unit, int world_size) {
  TESSERA_CHECK(world_size > 0);
  return ceil_div<std::int64_t>(unpadded_numel(unit), world_size);
}

FlatRange shard_of_parameter(const FlatUnit& unit, const FlatUnitParameter& parameter, int rank,
                             int world_size) {
  const std::int64_t share = sharded_numel(unit, world_size);
  const std::int64_t numel = numel_of(parameter.shape);
  const std::int64_t begin = std::clamp<std::int64_t>(rank * share - parameter.offset, 0, numel);
  const std::int64_t end =
      std::clamp<std::int64_t>((rank + 1) * share - parameter.offset, 0, numel);
  return begin < end ? FlatRange{begin, end} : FlatRange{};
}

}  // namespace tessera
