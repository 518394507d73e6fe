#pragma once

#include <cstdint>

#include "embedding_kernels/bags.h"

namespace tessera::embedding {

/// The bags of one feature in consecutive samples. A thread takes one such block at a time.
struct BagBlock {
  TableView table;
  const std::int64_t* ids;      // ids of the whole batch
  const float* weights;         // one per id; if null, each weight is 1
  const std::int64_t* offsets;  // [num_bags + 1]: bag i has the ids [offsets[i], offsets[i + 1])
  std::int64_t num_bags;
};

}  // namespace tessera::embedding
