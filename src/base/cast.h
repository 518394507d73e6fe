#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/base/dtype.h"

namespace tessera {

/// Says whether `cast_elements` supports the cast. It casts every dtype except float4 and the
/// complex ones to float64 and float32; floating dtypes except float4 also to float16, bfloat16,
/// float8_e4m3fn and float8_e5m2; complex dtypes to each other; every dtype to itself.
bool can_cast(DType from, DType to);

/// Converts little-endian elements. Rounds once, to the nearest number, ties to even. Numbers that
/// are too large become infinity (NaN in float8_e4m3fn, which has no infinity). NaN stays NaN, but
/// its bits may change.
/// Requires: `can_cast(from, to)`; both spans hold the same number of elements.
void cast_elements(DType from, std::span<const std::byte> source, DType to,
                   std::span<std::byte> destination);

/// Returns the largest finite number of a dtype. Requires: the dtype is a real float, not float4.
double largest_finite(DType dtype);

/// Says whether a finite number of the dtype `from` can be too large for `to`: the cast makes it
/// infinite, or NaN in float8_e4m3fn. A complex number counts as its two parts.
/// Requires: `can_cast(from, to)`.
bool can_overflow(DType from, DType to);

/// Says whether a cast can make zero of a number that is not zero. A complex number counts as its
/// two parts. Requires: `can_cast(from, to)`.
bool can_underflow(DType from, DType to);

/// The numbers that a cast changed by more than rounding. An infinity counts as too large for
/// float8_e4m3fn, which has none; every other dtype keeps it.
struct CastLosses {
  std::int64_t num_too_large = 0;
  double largest_magnitude = 0.0;    // of the numbers that were too large; may be infinite
  std::int64_t num_became_zero = 0;  // numbers that were not zero before the cast

  void merge(const CastLosses& other);
};

/// What a cast makes of a number that is too large.
enum class TooLarge {
  becomes_infinity,        // NaN in float8_e4m3fn
  becomes_largest_finite,  // the sign stays
};

/// Casts as `cast_elements` does, but `too_large` decides what too large numbers become. Counts
/// these numbers, and those that become zero. Does not count NaN, nor an infinity if `to` has one.
/// Requires: as `cast_elements`.
CastLosses cast_and_count(DType from, std::span<const std::byte> source, DType to,
                          std::span<std::byte> destination, TooLarge too_large);

}  // namespace tessera
