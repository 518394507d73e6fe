#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "tessera/base/dtype.h"
#include "tessera/reshard/planner.h"

namespace tessera::arithmetic {

/// The results of a calculation, before they are rounded to the dtype of a tensor.
struct CalculatedNumbers {
  DType dtype;  // float32 or float64
  std::span<const std::byte> numbers;
  /// Positions of numbers that overflow `dtype`, but would be finite in a dtype with a larger
  /// range. Such a number is stored as infinity with its sign, or as NaN if its sign is not known.
  std::span<const std::size_t> overflowed;
};

/// Rounds numbers to `to`. Numbers that are too large for `to`, and those in `overflowed`, become
/// what `on_overflow` says. Returns whether numbers that were not zero became zero.
/// Throws: Error(mismatch) naming `path` and `fqn` if there are such numbers and `on_overflow` is
/// `refuse`, or if it is `saturate` and the sign of one of them is not known.
bool round_numbers(const CalculatedNumbers& calculated, reshard::OnOverflow on_overflow,
                   const std::string& path, const std::string& fqn, DType to,
                   std::span<std::byte> out);

}  // namespace tessera::arithmetic
