#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "tessera/base/dtype.h"
#include "tessera/reshard/planner.h"

namespace tessera::arithmetic {

/// What a calculation gave, and what it is rounded to.
struct CalculatedNumbers {
  DType dtype;  // float32 or float64
  std::span<const std::byte> numbers;
  /// Places of the numbers that are finite only in a dtype with a larger range. These are infinite,
  /// with their sign; NaN if no sign is known.
  std::span<const std::size_t> overflowed;
};

/// Rounds numbers to `to`. Numbers that are too large for `to`, and those that overflowed before,
/// become what `on_overflow` says.
/// Throws: Error(mismatch) naming `path` and `fqn` if there are such numbers and it says `refuse`,
/// or if it says `saturate` and one has no sign.
void round_numbers(const CalculatedNumbers& calculated, reshard::OnOverflow on_overflow,
                   const std::string& path, const std::string& fqn, DType to,
                   std::span<std::byte> out);

}  // namespace tessera::arithmetic
