#pragma once

#include <span>

#include "arithmetic/tensor_sum.h"

namespace tessera::arithmetic {

/// Adds a part of a product of two matrices to `sum`: the elements `window` of the region `region`.
/// `shape` is the shape of the whole product. Each element is the scale times the sum of `rank`
/// products, in order. Reads the matrices in parts, in bounded memory. `pass` says what is computed
/// (SumPass).
template <class Number>
void add_low_rank(const LowRankTerm& term, const Shape& shape, const Region& region,
                  FlatRange window, SumPass pass, std::span<Number> sum);

}  // namespace tessera::arithmetic
