#include "inspect/element.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <complex>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/cast.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

template <class T>
T load(std::span<const std::byte> bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// "OCP Microscaling Formats (MX) Specification" 1.0, 5.3.3: one sign bit, two exponent bits, one
// mantissa bit; no infinity, no NaN.
constexpr std::array<float, 16> kFloat4 = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                           -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

// The low half of a byte is the first element, as in torch.
template <class Number>
void decode_float4(std::span<const std::byte> bytes, std::span<Number> out) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto code = std::to_integer<unsigned>(bytes[i]);
    out[2 * i] = kFloat4[code & 15U];
    out[2 * i + 1] = kFloat4[code >> 4];
  }
}

// Returns the number for each of the 256 possible bytes of an 8-bit dtype.
template <DType dtype>
const std::array<float, 256>& byte_table() {
  static const std::array<float, 256> table = [] {
    std::array<std::byte, 256> codes{};
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i);
    std::array<float, 256> values{};
    cast_elements(dtype, codes, DType::float32, std::as_writable_bytes(std::span(values)));
    return values;
  }();
  return table;
}

const std::array<float, 256>* byte_table_of(DType dtype) {
  switch (dtype) {
    case DType::float8_e4m3fn:
      return &byte_table<DType::float8_e4m3fn>();
    case DType::float8_e5m2:
      return &byte_table<DType::float8_e5m2>();
    case DType::float8_e4m3fnuz:
      return &byte_table<DType::float8_e4m3fnuz>();
    case DType::float8_e5m2fnuz:
      return &byte_table<DType::float8_e5m2fnuz>();
    case DType::float8_e8m0fnu:
      return &byte_table<DType::float8_e8m0fnu>();
    default:
      return nullptr;
  }
}

template <class Real>
std::string shortest(Real value) {
  std::array<char, 64> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return std::string(text.data(), end);
}

// Returns how many decimal digits a text needs so that all values of a small float dtype have
// different texts.
int significant_digits(DType dtype) {
  switch (dtype) {
    case DType::float16:
    case DType::complex32:
      return 5;
    case DType::bfloat16:
      return 4;
    case DType::float8_e4m3fn:
    case DType::float8_e4m3fnuz:
    case DType::float8_e8m0fnu:
      return 3;
    default:
      return 2;
  }
}

std::string rounded(float value, int digits) {
  std::array<char, 64> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value,
                                 std::chars_format::general, digits)
                       .ptr;
  return std::string(text.data(), end);
}

std::string complex_text(const std::string& real, const std::string& imaginary) {
  const bool has_sign = imaginary.starts_with('-') || imaginary.starts_with('+');
  return real + (has_sign ? "" : "+") + imaginary + "j";
}

// Compares an integer exactly with a float that is not NaN. Returns -1 if the integer is smaller, 0
// if both are equal, else 1.
template <class Integer>
int compare(Integer a, double b) {
  constexpr double kBeyond = std::is_signed_v<Integer> ? 0x1p63 : 0x1p64;
  if (b >= kBeyond) return -1;
  if (b < (std::is_signed_v<Integer> ? -0x1p63 : 0.0)) return 1;
  const auto whole = static_cast<Integer>(b);
  if (a != whole) return a < whole ? -1 : 1;
  const double fraction = b - std::trunc(b);
  return fraction > 0 ? -1 : fraction < 0 ? 1 : 0;
}

double magnitude(double real, double imaginary) {
  // std::hypot would return infinity if the other part is infinite.
  if (std::isnan(real) || std::isnan(imaginary)) return std::numeric_limits<double>::quiet_NaN();
  const double exact = std::hypot(real, imaginary);
  if (std::isinf(real) || std::isinf(imaginary)) return exact;
  return std::min(exact, std::numeric_limits<double>::max());
}

}  // namespace

double to_double(const Number& number) {
  return std::visit([](auto value) { return static_cast<double>(value); }, number);
}

bool less(const Number& a, const Number& b) {
  return std::visit(
      [](auto x, auto y) {
        constexpr bool x_is_float = std::is_floating_point_v<decltype(x)>;
        constexpr bool y_is_float = std::is_floating_point_v<decltype(y)>;
        if constexpr (x_is_float && y_is_float) {
          return x < y;
        } else if constexpr (x_is_float) {
          return compare(y, x) > 0;
        } else if constexpr (y_is_float) {
          return compare(x, y) < 0;
        } else {
          return std::cmp_less(x, y);
        }
      },
      a, b);
}

std::string number_to_string(const Number& number) {
  return std::visit([](auto value) { return shortest(value); }, number);
}

std::string number_to_string(const Number& number, DType dtype) {
  const auto* value = std::get_if<double>(&number);
  if (value == nullptr || !is_floating_point(dtype) || dtype == DType::float64) {
    return number_to_string(number);
  }
  if (dtype == DType::float32) return shortest(static_cast<float>(*value));
  return rounded(static_cast<float>(*value), significant_digits(dtype));
}

std::string element_to_string(DType dtype, std::span<const std::byte> bytes) {
  switch (dtype) {
    case DType::boolean:
      return bytes[0] != std::byte{0} ? "true" : "false";
    case DType::uint8:
      return std::to_string(load<std::uint8_t>(bytes));
    case DType::int8:
      return std::to_string(load<std::int8_t>(bytes));
    case DType::uint16:
      return std::to_string(load<std::uint16_t>(bytes));
    case DType::int16:
      return std::to_string(load<std::int16_t>(bytes));
    case DType::uint32:
      return std::to_string(load<std::uint32_t>(bytes));
    case DType::int32:
      return std::to_string(load<std::int32_t>(bytes));
    case DType::uint64:
      return std::to_string(load<std::uint64_t>(bytes));
    case DType::int64:
      return std::to_string(load<std::int64_t>(bytes));
    case DType::float32:
      return shortest(load<float>(bytes));
    case DType::float64:
      return shortest(load<double>(bytes));
    case DType::complex32:
      return complex_text(element_to_string(DType::float16, bytes.first(2)),
                          element_to_string(DType::float16, bytes.last(2)));
    case DType::complex64:
      return complex_text(element_to_string(DType::float32, bytes.first(4)),
                          element_to_string(DType::float32, bytes.last(4)));
    case DType::complex128:
      return complex_text(element_to_string(DType::float64, bytes.first(8)),
                          element_to_string(DType::float64, bytes.last(8)));
    case DType::float4_e2m1fn_x2: {
      std::array<float, 2> pair{};
      decode_float4(bytes, std::span<float>(pair));
      return rounded(pair[0], 2) + "|" + rounded(pair[1], 2);
    }
    default: {
      float value = 0;
      to_floats(dtype, bytes, {&value, 1});
      return rounded(value, significant_digits(dtype));
    }
  }
}

int numbers_per_element(DType dtype) {
  return dtype == DType::float4_e2m1fn_x2 ? 2 : 1;
}

bool fits_float32(DType dtype) {
  if (is_complex(dtype)) return false;
  return itemsize(dtype) <= 2 || dtype == DType::float32;
}

void to_floats(DType dtype, std::span<const std::byte> bytes, std::span<float> out) {
  TESSERA_CHECK(fits_float32(dtype));
  if (dtype == DType::float4_e2m1fn_x2) {
    decode_float4(bytes, out);
  } else if (const auto* table = byte_table_of(dtype)) {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = (*table)[std::to_integer<unsigned>(bytes[i])];
  } else {
    cast_elements(dtype, bytes, DType::float32, std::as_writable_bytes(out));
  }
}

void to_doubles(DType dtype, std::span<const std::byte> bytes, std::span<double> out) {
  if (dtype == DType::float4_e2m1fn_x2) {
    decode_float4(bytes, out);
  } else if (is_complex(dtype)) {
    std::vector<std::complex<double>> numbers(out.size());
    cast_elements(dtype, bytes, DType::complex128, std::as_writable_bytes(std::span(numbers)));
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = magnitude(numbers[i].real(), numbers[i].imag());
    }
  } else {
    cast_elements(dtype, bytes, DType::float64, std::as_writable_bytes(out));
  }
}

}  // namespace tessera::inspect
