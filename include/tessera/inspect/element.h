#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "tessera/base/dtype.h"

namespace tessera::inspect {

/// One number, exactly: integers stay integers.
using Number = std::variant<std::int64_t, std::uint64_t, double>;

/// Returns the nearest float64: integers of more than 53 bits are rounded.
double to_double(const Number& number);
bool less(const Number& a, const Number& b);  // exact, also between integers and floats

/// Returns the number in as few digits as its type needs: `7`, `0.1`, `-1.5e-08`, `inf`.
std::string number_to_string(const Number& number);

/// The same for a number that came out of elements of `dtype`: in the digits that tell it apart
/// from its neighbours there.
std::string number_to_string(const Number& number, DType dtype);

/// Returns one stored element as people write it, with the digits that its dtype can tell apart:
/// `true`, `-7`, `0.1001` (bfloat16), `1+2j`, and for float4's two elements `0.5|-6`.
/// Requires: `bytes.size() == itemsize(dtype)`.
std::string element_to_string(DType dtype, std::span<const std::byte> bytes);

/// Returns how many numbers one element holds: 2 for float4_e2m1fn_x2, else 1.
int numbers_per_element(DType dtype);

/// Converts elements to float64; complex ones to their magnitude, bool to 0 and 1. What 53 bits do
/// not hold (large 64-bit integers) is rounded.
/// Requires: `out.size() == numbers_per_element(dtype) * (bytes.size() / itemsize(dtype))`.
void to_doubles(DType dtype, std::span<const std::byte> bytes, std::span<double> out);

/// The same to float32. Requires: `fits_float32(dtype)`.
void to_floats(DType dtype, std::span<const std::byte> bytes, std::span<float> out);

/// Says whether every element of the dtype is a float32 exactly.
bool fits_float32(DType dtype);

}  // namespace tessera::inspect
