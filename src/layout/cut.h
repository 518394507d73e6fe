#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked_math.h"
#include "tessera/layout/region.h"

namespace tessera {

/// Returns part `index` of `[0, extent)`, cut as by torch.chunk: parts have ceil(extent /
/// num_parts) elements; at the end there may be a shorter one and then empty ones.
inline FlatRange chunk_of(std::int64_t extent, int index, int num_parts) {
  const std::int64_t share = ceil_div<std::int64_t>(extent, num_parts);
  const std::int64_t begin = std::min(share * index, extent);
  return {begin, std::min(begin + share, extent)};
}

}  // namespace tessera
