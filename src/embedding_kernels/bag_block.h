#pragma once

#include <cstdint>

#include "embedding_kernels/bags.h"

namespace tessera::embedding {

/// Bags of one feature for consecutive samples: the work of one thread at a time.
struct BagBlock {
  TableView table;
  const std::int64_t* ids;      // of the whole batch
  const float* weights;         // parallel to ids, or null: all are 1
  const std::int64_t* offsets;  // [num_bags + 1], into ids
  std::int64_t num_bags;
};

}  // namespace tessera::embedding
