#pragma once

#include <cstddef>
#include <span>

#include "tessera/base/dtype.h"

namespace tessera {

/// Says whether `cast_elements` supports the cast. Every dtype but float4 and complex casts to
/// float64 and float32; floating dtypes cast to float64, float32, float16, bfloat16, float8_e4m3fn
/// and float8_e5m2; complex dtypes cast to each other; a dtype always casts to itself.
bool can_cast(DType from, DType to);

/// Converts little-endian elements, rounding to nearest even as torch does. Numbers that are too
/// large become infinity (NaN in float8_e4m3fn, which has no infinity). NaN stays NaN, but its bits
/// may change.
/// Requires: `can_cast(from, to)`; both spans hold the same number of elements.
void cast_elements(DType from, std::span<const std::byte> source, DType to,
                   std::span<std::byte> destination);

}  // namespace tessera
