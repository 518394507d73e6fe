#pragma once

#include <span>

#include "arithmetic/tensor_sum.h"

namespace tessera::arithmetic {

/// Adds a part of the product in `term` to `sum`: the elements `window` of `region`, counted in the
/// region's own row-major order. `shape` is the shape of the whole product. Each element is the
/// scale times the sum of `rank` products, in order. Reads the two matrices in parts, in bounded
/// memory. `pass` says what is computed (SumPass).
template <class Number>
void add_low_rank(const LowRankTerm& term, const Shape& shape, const Region& region,
                  FlatRange window, SumPass pass, std::span<Number> sum);

}  // namespace tessera::arithmetic
