#pragma once

#include <cstdint>
#include <span>

#include "embedding_kernels/bags.h"

namespace tessera::embedding {

/// Sums the rows of each bag: out[b][column + k] = sum over the bag's places i, in order, of
/// weight_i * row_i[k], in float32. Writes every column of each feature; an empty bag gives zeros.
/// Shape: `out` is `[batch, out_stride]`. The same bits for any number of threads.
void pooled_sums(std::span<const TableView> tables, const Bags& bags, float* out,
                 std::int64_t out_stride, int num_threads);

/// Returns in `out[i]` the derivative of a loss by the weight of place i: the product of its bag's
/// gradient with its row. Shape: `out` has one element per id. `gradient.scale` is not applied.
void sample_weight_gradients(std::span<const TableView> tables, const Bags& bags,
                             const PooledGradient& gradient, float* out, int num_threads);

}  // namespace tessera::embedding
