#include "base/cast.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "tessera/base/error.h"

namespace tessera {
namespace {

// A float of 8 bits, described by its fields. Only formats with Specials::ieee have an infinity;
// the others use its codes for finite numbers ("FP8 Formats for Deep Learning", arXiv 2209.05433).
// The fnuz formats (arXiv 2206.02915) have one NaN, at the code of negative zero, and a bias that
// is larger by one.
struct Float8Format {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  enum class Specials { ieee, nan_at_all_ones, nan_at_negative_zero } specials;
};

constexpr Float8Format kE4M3fn{4, 3, 7, Float8Format::Specials::nan_at_all_ones};
constexpr Float8Format kE5M2{5, 2, 15, Float8Format::Specials::ieee};
constexpr Float8Format kE4M3fnuz{4, 3, 8, Float8Format::Specials::nan_at_negative_zero};
constexpr Float8Format kE5M2fnuz{5, 2, 16, Float8Format::Specials::nan_at_negative_zero};

float decode_float8(std::uint8_t code, const Float8Format& format) {
  const bool negative = (code & 0x80U) != 0;
  const int mantissa = code & ((1 << format.mantissa_bits) - 1);
  const int exponent = (code & 0x7F) >> format.mantissa_bits;
  const int all_ones = (1 << format.exponent_bits) - 1;
  // A NaN keeps its sign, as in torch.
  const float nan = std::copysign(std::numeric_limits<float>::quiet_NaN(), negative ? -1.0F : 1.0F);
  switch (format.specials) {
    case Float8Format::Specials::ieee:
      if (exponent == all_ones) {
        if (mantissa != 0) return nan;
        return negative ? -std::numeric_limits<float>::infinity()
                        : std::numeric_limits<float>::infinity();
      }
      break;
    case Float8Format::Specials::nan_at_all_ones:
      if ((code & 0x7F) == 0x7F) return nan;
      break;
    case Float8Format::Specials::nan_at_negative_zero:
      if (code == 0x80) return std::numeric_limits<float>::quiet_NaN();
      break;
  }
  const int fraction = exponent == 0 ? mantissa : mantissa | (1 << format.mantissa_bits);
  const int power = (exponent == 0 ? 1 : exponent) - format.bias - format.mantissa_bits;
  const float magnitude = std::ldexp(static_cast<float>(fraction), power);
  return negative ? -magnitude : magnitude;
}

float decode_e8m0(std::uint8_t code) {
  if (code == 0xFF) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0F, static_cast<int>(code) - 127);
}

// Returns the number that the 16 bits of a float16 stand for. Computes all three cases (subnormal,
// normal, infinite or NaN) and selects one, so that a loop over elements has no branches.
float decode_float16(std::uint16_t code) {
  constexpr std::uint32_t kExponentMask = 0x1FU << 23;
  constexpr std::uint32_t kBiasDifference = (127U - 15U) << 23;
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x8000U) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(code & 0x7FFFU) << 13;
  const std::uint32_t exponent = magnitude & kExponentMask;
  const std::uint32_t normal = magnitude + kBiasDifference;
  const std::uint32_t infinite_or_nan = normal + kBiasDifference;
  // A subnormal number has no hidden bit: add the bit, then subtract its value.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(normal + (1U << 23)) - 0x1p-14F);
  const std::uint32_t bits = exponent == 0               ? subnormal
                             : exponent == kExponentMask ? infinite_or_nan
                                                         : normal;
  return std::bit_cast<float>(bits | sign);
}

float decode_bfloat16(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

/// Rounds a finite magnitude, given by its float32 bits, to a format with fewer mantissa bits, to
/// nearest even. Returns the code without its sign. A code above the largest finite code means
/// overflow.
std::uint32_t round_to_code(std::uint32_t magnitude_bits, int mantissa_bits, int bias) {
  const int exponent = static_cast<int>(magnitude_bits >> 23) - 127 + bias;
  if (exponent <= 0) {
    // A subnormal counts units of 2^(1 - bias - mantissa_bits). The scaling is exact, so that only
    // nearbyint rounds.
    const double units = std::ldexp(static_cast<double>(std::bit_cast<float>(magnitude_bits)),
                                    bias - 1 + mantissa_bits);
    return static_cast<std::uint32_t>(std::nearbyint(units));
  }
  const int shift = 23 - mantissa_bits;
  const std::uint32_t fraction = magnitude_bits & 0x7FFFFFU;
  const std::uint32_t kept =
      (static_cast<std::uint32_t>(exponent) << mantissa_bits) | (fraction >> shift);
  const std::uint32_t rest = fraction & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  return kept + ((rest > half || (rest == half && (kept & 1U) != 0)) ? 1U : 0U);
}

template <class Code>
Code encode_small(float value, int mantissa_bits, int bias, std::uint32_t past_finite,
                  std::uint32_t infinity, std::uint32_t nan) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 31) << (sizeof(Code) * 8 - 1);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<Code>(sign | nan);
  if (magnitude == 0x7F800000U) return static_cast<Code>(sign | infinity);
  const std::uint32_t code = round_to_code(magnitude, mantissa_bits, bias);
  return static_cast<Code>(sign | (code >= past_finite ? infinity : code));
}

std::uint16_t encode_float16(float v) {
  return encode_small<std::uint16_t>(v, 10, 15, 0x7C00, 0x7C00, 0x7E00);
}
std::uint16_t encode_bfloat16(float v) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  }
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
std::uint8_t encode_e4m3fn(float v) {
  return encode_small<std::uint8_t>(v, 3, 7, 0x7F, 0x7F, 0x7F);
}
std::uint8_t encode_e5m2(float v) {
  return encode_small<std::uint8_t>(v, 2, 15, 0x7C, 0x7C, 0x7F);
}

/// Rounds to float32 so that a second rounding to fewer bits gives the same result as one rounding
/// of the double. For this it rounds to odd if bits are lost.
float to_float_for_rounding(double value) {
  const auto nearest = static_cast<float>(value);
  if (!std::isfinite(value) || static_cast<double>(nearest) == value) return nearest;
  if (!std::isfinite(nearest)) return nearest;
  const bool above = std::fabs(static_cast<double>(nearest)) > std::fabs(value);
  const float toward_zero = above ? std::nextafter(nearest, 0.0F) : nearest;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(toward_zero) | 1U);
}

template <class Stored, class Number, class Decode>
void decode_all(std::span<const std::byte> source, std::span<Number> out, Decode decode) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, source.data() + i * sizeof(Stored), sizeof(Stored));
    out[i] = static_cast<Number>(decode(stored));
  }
}

/// Decodes elements to `Number`, which is float if a float holds the dtype exactly, else double.
template <class Number>
void decode(DType from, std::span<const std::byte> source, std::span<Number> out) {
  const auto as_is = [](auto v) { return v; };
  switch (from) {
    case DType::boolean:
      return decode_all<std::uint8_t>(source, out, [](auto v) { return v != 0 ? 1 : 0; });
    case DType::uint8:
      return decode_all<std::uint8_t>(source, out, as_is);
    case DType::int8:
      return decode_all<std::int8_t>(source, out, as_is);
    case DType::uint16:
      return decode_all<std::uint16_t>(source, out, as_is);
    case DType::int16:
      return decode_all<std::int16_t>(source, out, as_is);
    case DType::uint32:
      return decode_all<std::uint32_t>(source, out, as_is);
    case DType::int32:
      return decode_all<std::int32_t>(source, out, as_is);
    case DType::uint64:
      return decode_all<std::uint64_t>(source, out, as_is);
    case DType::int64:
      return decode_all<std::int64_t>(source, out, as_is);
    case DType::float16:
      return decode_all<std::uint16_t>(source, out, decode_float16);
    case DType::bfloat16:
      return decode_all<std::uint16_t>(source, out, decode_bfloat16);
    case DType::float32:
      return decode_all<float>(source, out, as_is);
    case DType::float64:
      return decode_all<double>(source, out, as_is);
    case DType::float8_e4m3fn:
      return decode_all<std::uint8_t>(source, out,
                                      [](auto v) { return decode_float8(v, kE4M3fn); });
    case DType::float8_e5m2:
      return decode_all<std::uint8_t>(source, out, [](auto v) { return decode_float8(v, kE5M2); });
    case DType::float8_e4m3fnuz:
      return decode_all<std::uint8_t>(source, out,
                                      [](auto v) { return decode_float8(v, kE4M3fnuz); });
    case DType::float8_e5m2fnuz:
      return decode_all<std::uint8_t>(source, out,
                                      [](auto v) { return decode_float8(v, kE5M2fnuz); });
    case DType::float8_e8m0fnu:
      return decode_all<std::uint8_t>(source, out, decode_e8m0);
    case DType::complex32:
    case DType::complex64:
    case DType::complex128:
    case DType::float4_e2m1fn_x2:
      break;
  }
  TESSERA_CHECK(false && "cast_elements: no such cast");
}

template <class Stored, class Number, class Encode>
void encode_all(std::span<const Number> source, std::span<std::byte> out, Encode encode) {
  for (std::size_t i = 0; i < source.size(); ++i) {
    const Stored stored = encode(source[i]);
    std::memcpy(out.data() + i * sizeof(Stored), &stored, sizeof(Stored));
  }
}

template <class Number>
void encode(std::span<const Number> source, DType to, std::span<std::byte> out) {
  const auto narrow = [](Number v) {
    if constexpr (std::is_same_v<Number, double>) {
      return to_float_for_rounding(v);
    } else {
      return v;
    }
  };
  switch (to) {
    case DType::float64:
      return encode_all<double>(source, out, [](Number v) { return static_cast<double>(v); });
    case DType::float32:
      return encode_all<float>(source, out, [](Number v) { return static_cast<float>(v); });
    case DType::float16:
      return encode_all<std::uint16_t>(source, out,
                                       [&](Number v) { return encode_float16(narrow(v)); });
    case DType::bfloat16:
      return encode_all<std::uint16_t>(source, out,
                                       [&](Number v) { return encode_bfloat16(narrow(v)); });
    case DType::float8_e4m3fn:
      return encode_all<std::uint8_t>(source, out,
                                      [&](Number v) { return encode_e4m3fn(narrow(v)); });
    case DType::float8_e5m2:
      return encode_all<std::uint8_t>(source, out,
                                      [&](Number v) { return encode_e5m2(narrow(v)); });
    default:
      break;
  }
  TESSERA_CHECK(false && "cast_elements: no such cast");
}

/// Returns the dtype of the real and of the imaginary part of a complex dtype.
DType real_dtype_of(DType complex) {
  switch (complex) {
    case DType::complex32:
      return DType::float16;
    case DType::complex64:
      return DType::float32;
    default:
      return DType::float64;
  }
}

bool fits_float(DType dtype) {
  return itemsize(dtype) <= 2 || dtype == DType::float32;
}

/// Returns the smallest positive number, also subnormal. Requires: a real float dtype, not float4.
double smallest_positive(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return std::numeric_limits<double>::denorm_min();
    case DType::float32:
      return 0x1p-149;
    case DType::bfloat16:
      return 0x1p-133;
    case DType::float8_e8m0fnu:
      return 0x1p-127;
    case DType::float16:
      return 0x1p-24;
    case DType::float8_e5m2fnuz:
      return 0x1p-17;
    case DType::float8_e5m2:
      return 0x1p-16;
    case DType::float8_e4m3fnuz:
      return 0x1p-10;
    case DType::float8_e4m3fn:
      return 0x1p-9;
    default:
      break;
  }
  TESSERA_CHECK(false && "smallest_positive: no such float");
}

/// Returns the largest magnitude that stays finite when it is rounded to the dtype.
template <class Number>
Number largest_castable(DType to) {
  const auto below = [](double overflowing) {
    return std::nextafter(static_cast<Number>(overflowing), Number{0});
  };
  switch (to) {
    case DType::float16:
      return below(0x1.FFEp15);  // below the tie of 65504, the largest number, and the next
    case DType::bfloat16:
      return below(0x1.FFp127);
    case DType::float8_e5m2:
      return below(0x1.Ep15);
    case DType::float8_e4m3fn:
      return Number{464};  // a tie of 448 and 480; rounds to 448
    case DType::float32:
      if constexpr (std::is_same_v<Number, double>) return below(0x1.FFFFFFp127);
      break;
    default:
      break;
  }
  return std::numeric_limits<Number>::max();
}

/// The smallest and the largest code among some floats. A code is the bits of a float without its
/// sign, read as an integer. Codes have the same order as the magnitudes of the floats.
struct MagnitudeRange {
  std::int32_t smallest;
  std::int32_t largest;
};

/// Returns the smallest and the largest of the codes, without their signs. `mask` selects all bits
/// of a code but the sign. `Code` is a signed type if it has more than 8 bits, because processors
/// compare signed numbers fastest.
template <class Code>
MagnitudeRange magnitudes_of(std::span<const std::byte> codes, Code mask) {
  Code smallest = mask;
  Code largest = 0;
  for (std::size_t i = 0; i < codes.size() / sizeof(Code); ++i) {
    Code code;
    std::memcpy(&code, codes.data() + i * sizeof(Code), sizeof(Code));
    const auto magnitude = static_cast<Code>(code & mask);
    smallest = std::min(smallest, magnitude);
    largest = std::max(largest, magnitude);
  }
  return {smallest, largest};
}

MagnitudeRange magnitudes_of(std::span<const std::byte> codes, DType dtype) {
  switch (itemsize(dtype)) {
    case 1:
      return magnitudes_of<std::uint8_t>(codes, 0x7F);
    case 2:
      return magnitudes_of<std::int16_t>(codes, 0x7FFF);
    case 4:
      return magnitudes_of<std::int32_t>(codes, 0x7FFFFFFF);
    default:
      break;
  }
  TESSERA_CHECK(false && "magnitudes_of: a cast to this dtype loses nothing");
}

/// Returns the smallest code, without its sign, that is infinite or NaN.
std::int32_t first_not_finite(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return 0x7F800000;
    case DType::float16:
      return 0x7C00;
    case DType::bfloat16:
      return 0x7F80;
    case DType::float8_e4m3fn:
      return 0x7F;
    case DType::float8_e5m2:
      return 0x7C;
    default:
      break;
  }
  TESSERA_CHECK(false && "first_not_finite: a cast to this dtype loses nothing");
}

/// Counts the numbers that are not zero, but whose codes are zero: the cast made them zero.
template <class Code, class Number>
std::int64_t count_became_zero(std::span<const Number> numbers, std::span<const std::byte> codes,
                               Code mask) {
  std::int32_t count = 0;  // of one batch; processors add 32-bit numbers fastest
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    Code code;
    std::memcpy(&code, codes.data() + i * sizeof(Code), sizeof(Code));
    count += static_cast<std::int32_t>((code & mask) == 0) &
             static_cast<std::int32_t>(numbers[i] != Number{0});
  }
  return count;
}

template <class Number>
std::int64_t count_became_zero(std::span<const Number> numbers, std::span<const std::byte> codes,
                               DType dtype) {
  switch (itemsize(dtype)) {
    case 1:
      return count_became_zero<std::uint8_t>(numbers, codes, 0x7F);
    case 2:
      return count_became_zero<std::uint16_t>(numbers, codes, 0x7FFF);
    default:
      return count_became_zero<std::uint32_t>(numbers, codes, 0x7FFFFFFF);
  }
}

constexpr std::size_t kBatchNumel = 1024;

/// Returns the largest magnitude that CastLosses counts as too large for `to`: infinity if `to` has
/// no infinity, else the largest finite number.
template <class Number>
Number largest_counted(DType to) {
  return to == DType::float8_e4m3fn ? std::numeric_limits<Number>::infinity()
                                    : std::numeric_limits<Number>::max();
}

/// The magnitudes that are too large for a dtype: above `limit`, up to `largest`.
template <class Number>
struct TooLargeRange {
  Number limit;
  Number largest;

  bool contains(Number number) const {
    const Number magnitude = std::fabs(number);
    return magnitude > limit && magnitude <= largest;
  }
};

/// Encodes at most kBatchNumel numbers, and counts those that are too large or become zero.
template <class Number>
CastLosses encode_and_count(std::span<const Number> numbers, DType to, std::span<std::byte> out,
                            TooLarge too_large) {
  encode<Number>(numbers, to, out);
  const MagnitudeRange magnitudes = magnitudes_of(out, to);
  CastLosses losses;
  if (magnitudes.smallest == 0) losses.num_became_zero = count_became_zero(numbers, out, to);
  if (magnitudes.largest < first_not_finite(to)) return losses;
  const TooLargeRange<Number> range{largest_castable<Number>(to), largest_counted<Number>(to)};
  for (const Number number : numbers) {
    if (range.contains(number)) losses.merge({1, static_cast<double>(std::fabs(number)), 0});
  }
  if (losses.num_too_large == 0 || too_large == TooLarge::becomes_infinity) return losses;
  const auto largest = static_cast<Number>(largest_finite(to));
  Number saturated[kBatchNumel];
  std::ranges::transform(numbers, saturated, [&](Number number) {
    return range.contains(number) ? std::copysign(largest, number) : number;
  });
  encode<Number>(std::span<const Number>(saturated, numbers.size()), to, out);
  return losses;
}

/// Returns the elements as `Number`s without a copy; nothing if they have another dtype or are not
/// aligned.
template <class Number>
std::optional<std::span<const Number>> as_numbers(DType dtype, std::span<const std::byte> source) {
  constexpr DType kOwn = std::is_same_v<Number, float> ? DType::float32 : DType::float64;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(source.data()) % alignof(Number) == 0;
  if (dtype != kOwn || !is_aligned) return std::nullopt;
  return std::span(reinterpret_cast<const Number*>(source.data()), source.size() / sizeof(Number));
}

/// Casts batch by batch: `encode_batch(numbers, out)` encodes one batch.
template <class Number, class EncodeBatch>
void cast_through(DType from, std::span<const std::byte> source, DType to,
                  std::span<std::byte> destination, EncodeBatch encode_batch) {
  Number decoded[kBatchNumel];
  const std::uint64_t from_itemsize = itemsize(from);
  const std::uint64_t to_itemsize = itemsize(to);
  const std::size_t numel = source.size() / from_itemsize;
  const auto numbers = as_numbers<Number>(from, source);
  for (std::size_t begin = 0; begin < numel; begin += kBatchNumel) {
    const std::size_t batch_numel = std::min(kBatchNumel, numel - begin);
    const auto out = destination.subspan(begin * to_itemsize, batch_numel * to_itemsize);
    if (numbers) {
      encode_batch(numbers->subspan(begin, batch_numel), out);
      continue;
    }
    const std::span<Number> batch(decoded, batch_numel);
    decode<Number>(from, source.subspan(begin * from_itemsize, batch_numel * from_itemsize), batch);
    encode_batch(std::span<const Number>(batch), out);
  }
}

}  // namespace

bool can_cast(DType from, DType to) {
  if (from == to) return true;
  if (is_complex(from) || is_complex(to)) return is_complex(from) && is_complex(to);
  if (from == DType::float4_e2m1fn_x2) return false;
  switch (to) {
    case DType::float64:
    case DType::float32:
      return true;
    case DType::float16:
    case DType::bfloat16:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      return is_floating_point(from);
    default:
      return false;
  }
}

void cast_elements(DType from, std::span<const std::byte> source, DType to,
                   std::span<std::byte> destination) {
  TESSERA_CHECK(can_cast(from, to));
  TESSERA_CHECK(source.size() / itemsize(from) == destination.size() / itemsize(to));
  if (from == to) {
    if (!source.empty()) std::memcpy(destination.data(), source.data(), source.size());
    return;
  }
  if (is_complex(from)) {
    cast_elements(real_dtype_of(from), source, real_dtype_of(to), destination);
    return;
  }
  const auto encode_batch = [to](auto numbers, std::span<std::byte> out) {
    encode(numbers, to, out);
  };
  if (fits_float(from)) {
    cast_through<float>(from, source, to, destination, encode_batch);
  } else {
    cast_through<double>(from, source, to, destination, encode_batch);
  }
}

double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return 65504.0;
    case DType::bfloat16:
      return 0x1.FEp127;
    case DType::float32:
      return std::numeric_limits<float>::max();
    case DType::float64:
      return std::numeric_limits<double>::max();
    case DType::float8_e4m3fn:
      return 448.0;
    case DType::float8_e4m3fnuz:
      return 240.0;
    case DType::float8_e5m2:
    case DType::float8_e5m2fnuz:
      return 57344.0;
    case DType::float8_e8m0fnu:
      return 0x1p127;
    default:
      break;
  }
  TESSERA_CHECK(false && "largest_finite: no such float");
}

bool can_overflow(DType from, DType to) {
  if (from == to) return false;
  if (is_complex(from)) return can_overflow(real_dtype_of(from), real_dtype_of(to));
  // Integers cast only to float32 and float64, whose ranges include all integers of 64 bits.
  return is_floating_point(from) && largest_finite(from) > largest_castable<double>(to);
}

bool can_underflow(DType from, DType to) {
  if (from == to) return false;
  if (is_complex(from)) return can_underflow(real_dtype_of(from), real_dtype_of(to));
  // Half of the smallest positive number of `to` is a tie, which rounds to zero.
  return is_floating_point(from) && smallest_positive(from) <= smallest_positive(to) / 2;
}

void CastLosses::merge(const CastLosses& other) {
  num_too_large += other.num_too_large;
  largest_magnitude = std::max(largest_magnitude, other.largest_magnitude);
  num_became_zero += other.num_became_zero;
}

CastLosses cast_and_count(DType from, std::span<const std::byte> source, DType to,
                          std::span<std::byte> destination, TooLarge too_large) {
  if (!can_overflow(from, to) && !can_underflow(from, to)) {
    cast_elements(from, source, to, destination);
    return {};
  }
  TESSERA_CHECK(can_cast(from, to));
  TESSERA_CHECK(source.size() / itemsize(from) == destination.size() / itemsize(to));
  if (is_complex(from)) {
    return cast_and_count(real_dtype_of(from), source, real_dtype_of(to), destination, too_large);
  }
  CastLosses losses;
  const auto encode_batch = [&](auto numbers, std::span<std::byte> out) {
    losses.merge(encode_and_count(numbers, to, out, too_large));
  };
  if (fits_float(from)) {
    cast_through<float>(from, source, to, destination, encode_batch);
  } else {
    cast_through<double>(from, source, to, destination, encode_batch);
  }
  return losses;
}

}  // namespace tessera
