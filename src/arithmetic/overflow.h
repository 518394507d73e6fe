#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/cast.h"
#include "tessera/base/dtype.h"
#include "tessera/reshard/planner.h"

namespace tessera::arithmetic {

/// The results of a calculation, before they are rounded to the dtype of a tensor.
struct CalculatedNumbers {
  DType dtype;  // float32 or float64
  std::span<const std::byte> numbers;
  /// Positions of numbers that are too large for `dtype`, but finite in a dtype with a larger
  /// range. Such a number is stored as infinity with its sign, or as NaN if its sign is not known.
  std::span<const std::size_t> overflowed;
};

/// Rounds numbers to `to`. `on_overflow` decides what becomes of numbers that are too large for
/// `to`, and of the numbers in `overflowed`. Returns the count of these numbers, and of numbers
/// that were not zero and became zero. Throws: Error(mismatch) naming `path` and `fqn` if
/// `on_overflow` is `refuse` and a number is too large, or if `on_overflow` is `saturate` and the
/// sign of a number that is too large is not known.
CastLosses round_numbers(const CalculatedNumbers& calculated, reshard::OnOverflow on_overflow,
                         const std::string& path, const std::string& fqn, DType to,
                         std::span<std::byte> out);

}  // namespace tessera::arithmetic
