#pragma once

#include <cstdint>
#include <span>

#include "tessera/base/dtype.h"

namespace tessera::embedding {

/// A dense, row-major view of a table, or of the shard of a table that this process holds.
struct TableView {
  void* weights;
  DType dtype;  // float32, float16 or bfloat16
  std::int64_t rows;
  std::int64_t dim;
};

/// The ids of a KeyedJaggedTensor, by feature, then sample. Bag: a feature's ids in one sample.
struct Bags {
  std::span<const int> table_of_feature;  // by feature: the index of its table
  /// First column of each feature in the pooled output.
  std::span<const std::int64_t> column_of_feature;
  std::int64_t batch;                     // number of samples
  std::span<const std::int64_t> ids;      // rows of the feature's table
  std::span<const std::int64_t> offsets;  // [features * batch + 1]: where each bag begins in ids
  std::span<const float> weights;         // one per id; if empty, each weight is 1

  std::int64_t num_features() const { return static_cast<std::int64_t>(table_of_feature.size()); }
};

/// The gradient of a pooled output, `[batch, stride]`, float32.
struct PooledGradient {
  const float* data;
  std::int64_t stride;  // elements from one sample to the next
  float scale = 1;      // factor of each row's gradient
};

}  // namespace tessera::embedding
