#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked_math.h"
#include "tessera/layout/region.h"

namespace tessera {

/// Cuts `[0, extent)` into `num_ranges` ranges as torch.chunk does, and returns range number
/// `index`. Ranges have ceil(extent / num_ranges) elements; at the end there may be a shorter range
/// and then empty ranges.
inline FlatRange chunk_of(std::int64_t extent, int index, int num_ranges) {
  const std::int64_t share = ceil_div<std::int64_t>(extent, num_ranges);
  const std::int64_t begin = std::min(share * index, extent);
  return {begin, std::min(begin + share, extent)};
}

}  // namespace tessera
