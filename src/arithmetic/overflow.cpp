#include "arithmetic/overflow.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "reshard/cast_losses.h"
#include "tessera/base/error.h"

namespace tessera::arithmetic {
namespace {

double number_at(const CalculatedNumbers& calculated, std::size_t place) {
  const std::size_t size = itemsize(calculated.dtype);
  double number = 0.0;
  cast_elements(calculated.dtype, calculated.numbers.subspan(place * size, size), DType::float64,
                std::as_writable_bytes(std::span(&number, 1)));
  return number;
}

/// Replaces the numbers in `calculated.overflowed`, and no others, by the largest finite number of
/// `to` with the same sign. Throws: Error(mismatch) if one is NaN (terms of both signs too large).
void saturate(const CalculatedNumbers& calculated, const std::string& path, const std::string& fqn,
              DType to, std::span<std::byte> out) {
  const std::size_t size = itemsize(to);
  for (const std::size_t place : calculated.overflowed) {
    const double number = number_at(calculated, place);
    if (std::isnan(number)) {
      throw Error::expected(
          ErrorKind::mismatch, {.path = path, .fqn = fqn}, "overflow",
          "a sum whose sign is known, to replace it by the largest number of this sign",
          "NaN, because terms of both signs are too large");
    }
    const double largest = std::copysign(largest_finite(to), number);
    cast_elements(DType::float64, std::as_bytes(std::span(&largest, 1)), to,
                  out.subspan(place * size, size));
  }
}

}  // namespace

CastLosses round_numbers(const CalculatedNumbers& calculated, reshard::OnOverflow on_overflow,
                         const std::string& path, const std::string& fqn, DType to,
                         std::span<std::byte> out) {
  CastLosses losses = cast_and_count(calculated.dtype, calculated.numbers, to, out,
                                     reshard::too_large_by(on_overflow));
  if (on_overflow == reshard::OnOverflow::saturate) saturate(calculated, path, fqn, to, out);
  if (!calculated.overflowed.empty()) {
    // The cast has counted infinities if `to` has none. It never counts NaN.
    const auto is_uncounted = [&](std::size_t place) {
      return to != DType::float8_e4m3fn || std::isnan(number_at(calculated, place));
    };
    losses.merge({.num_too_large = std::ranges::count_if(calculated.overflowed, is_uncounted),
                  .largest_magnitude = std::numeric_limits<double>::infinity()});
  }
  if (on_overflow == reshard::OnOverflow::refuse && losses.num_too_large > 0) {
    throw reshard::overflow_error(path, fqn, to, losses);
  }
  return losses;
}

}  // namespace tessera::arithmetic
