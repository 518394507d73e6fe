#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>

namespace tessera {

/// Returns `a * b`, or nothing if the product does not fit.
template <std::integral T>
constexpr std::optional<T> checked_mul(T a, T b) {
  T product{};
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

/// Returns `a + b`, or nothing if the sum does not fit.
template <std::integral T>
constexpr std::optional<T> checked_add(T a, T b) {
  T sum{};
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

/// Returns the product of `sizes` (1 when empty). If a size is zero, the product is zero, however
/// large the other sizes are. Returns nothing if a size is negative (also beside a zero), or if the
/// product does not fit into int64_t. Units: elements.
constexpr std::optional<std::int64_t> checked_numel(std::span<const std::int64_t> sizes) {
  std::int64_t numel = 1;
  bool any_zero = false;
  for (std::int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    if (size == 0) any_zero = true;
  }
  if (any_zero) return 0;
  for (std::int64_t size : sizes) {
    const auto product = checked_mul(numel, size);
    if (!product) return std::nullopt;
    numel = *product;
  }
  return numel;
}

/// Returns `a / b` rounded up. Requires: `a >= 0`, `b > 0`.
template <std::integral T>
constexpr T ceil_div(T a, T b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Returns `a` rounded up to a multiple of `b`. Requires: `a >= 0`, `b > 0`, and the result fits.
template <std::integral T>
constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace tessera
