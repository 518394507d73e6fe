#pragma once

#include <cstdint>

namespace tessera {

/// Sets each of the `numel` elements of `sum` to (sum + addend) * factor, in one pass over memory.
void add_and_multiply(float* sum, const float* addend, float factor, std::int64_t numel);
void add_and_multiply(double* sum, const double* addend, double factor, std::int64_t numel);

}  // namespace tessera
