#pragma once

#include <cstdint>
#include <span>

#include "embedding_kernels/bags.h"

namespace tessera::embedding {

/// Sums the rows of each bag: out[b][column + k] is the sum of weight_i * row_i[k] over the bag's
/// positions i in `bags.ids`, in order and in float32. Writes all columns of each feature; an empty
/// bag gives zeros. Shape: `out` is `[batch, out_stride]`. Gives the same bits for any number of
/// threads.
void pooled_sums(std::span<const TableView> tables, const Bags& bags, float* out,
                 std::int64_t out_stride, int num_threads);

/// Sets `out[i]` to the gradient of the weight of `bags.ids[i]`: the dot product of the gradient of
/// that id's bag and the id's row. Shape: `out` has one element per id. Ignores `gradient.scale`.
void sample_weight_gradients(std::span<const TableView> tables, const Bags& bags,
                             const PooledGradient& gradient, float* out, int num_threads);

}  // namespace tessera::embedding
