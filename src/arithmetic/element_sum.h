#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "tessera/base/dtype.h"

namespace tessera::arithmetic {

/// Returns whether tensors of a dtype can be added up: a real or complex floating-point dtype whose
/// numbers can be cast to float64 and back (can_cast). False for integers and bool.
bool can_be_summed(DType dtype);

/// Returns the real dtype of the numbers of a dtype: float32 for complex64, else the same.
DType number_dtype(DType dtype);
/// Returns how many numbers an element has: 2 if it is complex.
std::size_t numbers_per_element(DType dtype);

/// Returns, as bytes, one float64 for each element: NaN if the element is infinite or NaN, else 0.
/// Requires: `dtype` is real.
std::vector<std::byte> infinities_of(DType dtype, std::span<const std::byte> elements);

// Sums of numbers, element by element, in the order of the calls. `Number` is float or double.
// `elements` are of the real dtype `dtype`, one for each number of `sum`. No multiply-add is fused,
// so all machines compute equal sums.

/// `sum = weight * elements`
template <class Number>
void start_sum(DType dtype, std::span<const std::byte> elements, double weight,
               std::span<Number> sum);
/// `sum = keep * sum + weight * elements`
template <class Number>
void add_to_sum(DType dtype, std::span<const std::byte> elements, double keep, double weight,
                std::span<Number> sum);
/// `sum = sum / divisor`
template <class Number>
void divide_sum(double divisor, std::span<Number> sum);
/// `sum = sum + factor * row`
template <class Number>
void add_multiple(Number factor, std::span<const Number> row, std::span<Number> sum);

}  // namespace tessera::arithmetic
