#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "tessera/base/dtype.h"

namespace tessera::inspect {

/// A number without rounding: integers stay integers.
using Number = std::variant<std::int64_t, std::uint64_t, double>;

/// Returns the nearest float64: integers of more than 53 bits are rounded.
double to_double(const Number& number);
bool less(const Number& a, const Number& b);  // exact, also between integers and floats

/// Returns the shortest text that identifies the number: `7`, `0.1`, `-1.5e-08`, `inf`.
std::string number_to_string(const Number& number);

/// Returns a number from elements of `dtype` as text, with just the digits that distinguish the
/// number from its neighbours in that dtype.
std::string number_to_string(const Number& number, DType dtype);

/// Returns one stored element as text, with the digits that its dtype can distinguish: `true`,
/// `-7`, `0.1001` (bfloat16), `1+2j`, and `0.5|-6` for the two numbers of a float4 element.
/// Requires: `bytes.size() == itemsize(dtype)`.
std::string element_to_string(DType dtype, std::span<const std::byte> bytes);

/// Returns how many numbers one element holds: 2 for float4_e2m1fn_x2, else 1.
int numbers_per_element(DType dtype);

/// Converts elements to float64: complex numbers to their magnitude, bool to 0 and 1. Rounds 64-bit
/// integers beyond 53 bits. A finite complex128 whose magnitude is beyond float64 becomes the
/// largest float64, so that only infinities become infinity. Requires: `out.size() ==
/// numbers_per_element(dtype) * (bytes.size() / itemsize(dtype))`.
void to_doubles(DType dtype, std::span<const std::byte> bytes, std::span<double> out);

/// Converts to float32, as `to_doubles` does to float64. Requires: `fits_float32(dtype)`.
void to_floats(DType dtype, std::span<const std::byte> bytes, std::span<float> out);

/// Returns whether float32 represents every element of the dtype exactly.
bool fits_float32(DType dtype);

}  // namespace tessera::inspect
