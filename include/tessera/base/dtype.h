#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// The element types of tensors: torch's dtypes except quantized ones (`qint8`), raw bits (`bits8`)
/// and integers below one byte (`uint4`). The numbers are stored on disk: never change one.
enum class DType : std::uint8_t {
  boolean = 0,
  uint8 = 1,
  int8 = 2,
  uint16 = 3,
  int16 = 4,
  uint32 = 5,
  int32 = 6,
  uint64 = 7,
  int64 = 8,
  float16 = 9,
  bfloat16 = 10,
  float32 = 11,
  float64 = 12,
  complex32 = 13,
  complex64 = 14,
  complex128 = 15,
  float8_e4m3fn = 16,
  float8_e5m2 = 17,
  float8_e4m3fnuz = 18,
  float8_e5m2fnuz = 19,
  float8_e8m0fnu = 20,
  float4_e2m1fn_x2 = 21,  // one byte holds two elements; shape counts bytes, as in torch
};

inline constexpr int kNumDTypes = 22;

/// Returns torch's spelling without `torch.`: `bool`, `bfloat16`, `float8_e4m3fn`.
std::string_view dtype_name(DType dtype);

/// Returns the dtype whose name in torch is `name` (with or without `torch.`); nothing if there is
/// no such dtype. Also accepts torch's short names (`half`, `float`, `long`, …).
std::optional<DType> parse_dtype(std::string_view name);

/// Returns the "expected" text for an error about the unknown dtype `name`: `a dtype of torch`. For
/// a short form of another library, such as `bf16`: `a dtype of torch such as bfloat16`.
std::string dtype_expectation(std::string_view name);

/// Returns the dtype stored on disk as `code`, or nothing if no dtype has that code.
std::optional<DType> dtype_from_code(std::uint8_t code);

/// Returns an element's size in bytes. A complex number, or a pair of 4-bit floats, is one element.
std::uint64_t itemsize(DType dtype);

bool is_floating_point(DType dtype);  // true for real (not complex) floats of any width
bool is_complex(DType dtype);         // true if elements have a real and an imaginary part

}  // namespace tessera
