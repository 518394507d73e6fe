#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked_math.h"
#include "tessera/layout/region.h"

namespace tessera {

/// Returns range `index` of `[0, extent)`, cut as by torch.chunk: ranges have ceil(extent /
/// num_ranges) elements; at the end there may be a shorter one and then empty ones.
inline FlatRange chunk_of(std::int64_t extent, int index, int num_ranges) {
  const std::int64_t share = ceil_div<std::int64_t>(extent, num_ranges);
  const std::int64_t begin = std::min(share * index, extent);
  return {begin, std::min(begin + share, extent)};
}

}  // namespace tessera
