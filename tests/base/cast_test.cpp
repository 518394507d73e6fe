#include "base/cast.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace tessera {
namespace {

template <class To, class From>
To cast_one(DType from, From value, DType to) {
  To result{};
  cast_elements(from, std::as_bytes(std::span(&value, 1)), to,
                std::as_writable_bytes(std::span(&result, 1)));
  return result;
}

float decode16(DType dtype, std::uint16_t code) {
  return cast_one<float>(dtype, code, DType::float32);
}
float decode8(DType dtype, std::uint8_t code) {
  return cast_one<float>(dtype, code, DType::float32);
}

TEST(CastTest, Every16BitCodeSurvivesFloat32) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (unsigned code = 0; code <= 0xFFFF; ++code) {
      const float value = decode16(dtype, static_cast<std::uint16_t>(code));
      if (std::isnan(value)) continue;
      ASSERT_EQ(cast_one<std::uint16_t>(DType::float32, value, dtype), code) << dtype_name(dtype);
    }
  }
}

TEST(CastTest, EveryFloat16CodeIsTheNumberThatItsFieldsSay) {
  for (int code = 0; code <= 0xFFFF; ++code) {
    const int exponent = (code >> 10) & 0x1F;
    const int mantissa = code & 0x3FF;
    const float value = decode16(DType::float16, static_cast<std::uint16_t>(code));
    ASSERT_EQ(std::signbit(value), (code & 0x8000) != 0) << code;
    if (exponent == 0x1F) {
      ASSERT_EQ(std::isnan(value), mantissa != 0) << code;
      ASSERT_EQ(std::isinf(value), mantissa == 0) << code;
      continue;
    }
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -24)
                                : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    ASSERT_EQ(std::fabs(value), magnitude) << code;
  }
}

TEST(CastTest, EveryFloat8CodeSurvivesFloat32) {
  for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2}) {
    for (unsigned code = 0; code <= 0xFF; ++code) {
      const float value = decode8(dtype, static_cast<std::uint8_t>(code));
      if (std::isnan(value)) continue;
      ASSERT_EQ(cast_one<std::uint8_t>(DType::float32, value, dtype), code) << dtype_name(dtype);
    }
  }
}

TEST(CastTest, KnownNumbersOfTheSmallFormats) {
  EXPECT_EQ(decode8(DType::float8_e4m3fn, 0x7E), 448.0F);
  EXPECT_TRUE(std::isnan(decode8(DType::float8_e4m3fn, 0x7F)));
  EXPECT_EQ(decode8(DType::float8_e4m3fn, 0x01), std::ldexp(1.0F, -9));
  EXPECT_EQ(decode8(DType::float8_e5m2, 0x7B), 57344.0F);
  EXPECT_TRUE(std::isinf(decode8(DType::float8_e5m2, 0x7C)));
  EXPECT_EQ(decode8(DType::float8_e4m3fnuz, 0x7F), 240.0F);
  EXPECT_TRUE(std::isnan(decode8(DType::float8_e4m3fnuz, 0x80)));
  EXPECT_EQ(decode8(DType::float8_e5m2fnuz, 0x7F), 57344.0F);
  EXPECT_EQ(decode8(DType::float8_e8m0fnu, 127), 1.0F);
  EXPECT_EQ(decode16(DType::float16, 0x0001), std::ldexp(1.0F, -24));
  EXPECT_EQ(decode16(DType::float16, 0x7BFF), 65504.0F);
}

TEST(CastTest, RoundsToNearestEvenAndOverflowsAsTorchDoes) {
  const auto half = [](float v) {
    return cast_one<std::uint16_t>(DType::float32, v, DType::float16);
  };
  EXPECT_EQ(half(1.0F + std::ldexp(1.0F, -11)), 0x3C00);                          // tie to even
  EXPECT_EQ(half(1.0F + std::ldexp(3.0F, -11)), 0x3C02);                          // tie to even
  EXPECT_EQ(half(1.0F + std::ldexp(1.0F, -11) + std::ldexp(1.0F, -20)), 0x3C01);  // above the tie
  EXPECT_EQ(half(65520.0F), 0x7C00);
  EXPECT_EQ(half(65519.0F), 0x7BFF);
  EXPECT_EQ(half(-1e30F), 0xFC00);
  EXPECT_EQ(half(std::ldexp(1.0F, -25)), 0);  // half of the smallest number: a tie, to zero
  EXPECT_EQ(half(std::ldexp(1.5F, -25)), 1);
  const auto e4m3 = [](float v) {
    return cast_one<std::uint8_t>(DType::float32, v, DType::float8_e4m3fn);
  };
  EXPECT_EQ(e4m3(448.0F), 0x7E);
  EXPECT_EQ(e4m3(1000.0F), 0x7F);  // there is no infinity
}

TEST(CastTest, DoubleIsRoundedOnce) {
  // Just above the tie between 1 and the next bfloat16. Rounded to float32 first, it is the tie.
  const double above_tie = 1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40);
  EXPECT_EQ(cast_one<std::uint16_t>(DType::float64, above_tie, DType::bfloat16), 0x3F81);
}

TEST(CastTest, NanStaysNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    EXPECT_TRUE(std::isnan(decode16(dtype, cast_one<std::uint16_t>(DType::float32, nan, dtype))));
  }
  // A NaN whose payload bits are all among those that bfloat16 drops.
  const auto quiet_tail = std::bit_cast<float>(0x7F800001U);
  EXPECT_TRUE(std::isnan(decode16(
      DType::bfloat16, cast_one<std::uint16_t>(DType::float32, quiet_tail, DType::bfloat16))));
}

TEST(CastTest, NanKeepsItsSign) {
  for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2}) {
    EXPECT_TRUE(std::signbit(decode8(dtype, 0xFF))) << dtype_name(dtype);
    EXPECT_FALSE(std::signbit(decode8(dtype, 0x7F))) << dtype_name(dtype);
    EXPECT_EQ(cast_one<std::uint8_t>(DType::float32, decode8(dtype, 0xFF), dtype), 0xFF);
  }
}

/// Casts numbers, and returns the codes of the result as numbers again.
struct Counted {
  CastLosses losses;
  std::vector<float> numbers;
};

template <class From>
Counted cast_and_count(DType from, const std::vector<From>& source, DType to, TooLarge too_large) {
  std::vector<std::byte> codes(source.size() * itemsize(to));
  Counted result;
  result.losses = cast_and_count(from, std::as_bytes(std::span(source)), to, codes, too_large);
  result.numbers.resize(source.size());
  cast_elements(to, codes, DType::float32, std::as_writable_bytes(std::span(result.numbers)));
  return result;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(CastLossesTest, CountsFiniteNumbersThatBecomeInfinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> source = {1.0F,      65519.0F,   65520.0F, -70000.0F,
                                     kInfinity, -kInfinity, nan};
  const auto [losses, numbers] =
      cast_and_count(DType::float32, source, DType::float16, TooLarge::becomes_infinity);
  EXPECT_EQ(losses.num_too_large, 2);
  EXPECT_EQ(losses.largest_magnitude, 70000.0);
  EXPECT_EQ(numbers[1], 65504.0F);
  EXPECT_EQ(numbers[2], kInfinity);
  EXPECT_EQ(numbers[3], -kInfinity);
  EXPECT_EQ(numbers[4], kInfinity);
  EXPECT_TRUE(std::isnan(numbers[6]));
}

TEST(CastLossesTest, SaturatedNumbersAreTheLargestOnesAndInfinitiesStay) {
  const std::vector<float> source = {1.0F, 65520.0F, -70000.0F, kInfinity, -kInfinity};
  const auto [losses, numbers] =
      cast_and_count(DType::float32, source, DType::float16, TooLarge::becomes_largest_finite);
  EXPECT_EQ(losses.num_too_large, 2);
  EXPECT_EQ(numbers, (std::vector<float>{1.0F, 65504.0F, -65504.0F, kInfinity, -kInfinity}));
}

TEST(CastLossesTest, WhatFloat8WithoutInfinityMakesNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> source = {464.0F, 464.5F, -1000.0F, -kInfinity, nan};
  const auto as_is =
      cast_and_count(DType::float32, source, DType::float8_e4m3fn, TooLarge::becomes_infinity);
  EXPECT_EQ(as_is.losses.num_too_large, 3);
  EXPECT_EQ(as_is.losses.largest_magnitude, kInfinity);
  EXPECT_EQ(as_is.numbers[0], 448.0F);
  for (const std::size_t i : {1U, 2U, 3U}) EXPECT_TRUE(std::isnan(as_is.numbers[i])) << i;
  const auto saturated = cast_and_count(DType::float32, source, DType::float8_e4m3fn,
                                        TooLarge::becomes_largest_finite);
  EXPECT_EQ(saturated.losses.num_too_large, 3);
  EXPECT_EQ(saturated.numbers[1], 448.0F);
  EXPECT_EQ(saturated.numbers[2], -448.0F);
  EXPECT_EQ(saturated.numbers[3], -448.0F);
  EXPECT_TRUE(std::isnan(saturated.numbers[4]));
}

// The count is right for every dtype: a number counts if it is finite and its code is not, or if it
// is infinite and its code is NaN.
TEST(CastLossesTest, CountsWhatTheCodesShow) {
  const DType small[] = {DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2,
                         DType::float32};
  std::vector<double> source = {0.0, 1e300, -1e300, std::numeric_limits<double>::infinity(),
                                std::numeric_limits<double>::quiet_NaN()};
  for (const DType to : small) {
    const double largest = largest_finite(to);
    for (const double factor : {1.0, 1.0 + 0x1p-30, 1.0 + 0x1p-25, 1.0 + 0x1p-24, 1.0 + 0x1p-9,
                                1.0 + 0x1p-8, 1.0 + 0x1p-4, 1.125, 2.0}) {
      const double number = largest * factor;
      for (const double each :
           {number, -number, std::nextafter(number, 0.0), std::nextafter(number, number * 2)}) {
        source.push_back(each);
      }
    }
  }
  for (const DType to : small) {
    SCOPED_TRACE(dtype_name(to));
    for (const double number : source) {
      const std::vector<double> one = {number};
      const auto [losses, numbers] =
          cast_and_count(DType::float64, one, to, TooLarge::becomes_infinity);
      const bool is_overflow = std::isfinite(number) ? !std::isfinite(numbers[0])
                                                     : std::isinf(number) && std::isnan(numbers[0]);
      EXPECT_EQ(losses.num_too_large, is_overflow ? 1 : 0) << number;
      EXPECT_EQ(losses.largest_magnitude, is_overflow ? std::fabs(number) : 0.0);
    }
  }
}

TEST(CastLossesTest, CountsNumbersThatBecomeZero) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> source = {1.0F, 0x1p-24F, 0x1.8p-25F, 0x1p-25F,  -0x1p-25F, 1e-30F,
                                     0.0F, -0.0F,    nan,        kInfinity, 70000.0F};
  for (const TooLarge too_large : {TooLarge::becomes_infinity, TooLarge::becomes_largest_finite}) {
    const auto [losses, numbers] =
        cast_and_count(DType::float32, source, DType::float16, too_large);
    EXPECT_EQ(losses.num_became_zero, 3);  // including the tie
    EXPECT_EQ(losses.num_too_large, 1);
    EXPECT_EQ(numbers[2], 0x1p-24F);
    EXPECT_EQ(numbers[3], 0.0F);
    EXPECT_TRUE(std::signbit(numbers[4]));
  }
}

// The count is right for every dtype: a number counts if it is not zero and its code is zero.
TEST(CastLossesTest, CountsTheZerosThatTheCodesShow) {
  const DType small[] = {DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2,
                         DType::float32};
  for (const DType to : small) {
    SCOPED_TRACE(dtype_name(to));
    int num_zeros = 0;
    for (int exponent = -160; exponent < 10; ++exponent) {
      for (const double number : {std::ldexp(1.0, exponent), std::ldexp(-1.25, exponent),
                                  std::nextafter(std::ldexp(1.0, exponent), 1.0)}) {
        const auto [losses, numbers] = cast_and_count(DType::float64, std::vector<double>{number},
                                                      to, TooLarge::becomes_infinity);
        EXPECT_EQ(losses.num_became_zero, numbers[0] == 0.0F ? 1 : 0) << number;
        num_zeros += numbers[0] == 0.0F ? 1 : 0;
      }
    }
    EXPECT_GT(num_zeros, 0);
  }
}

TEST(CastLossesTest, CountsInEveryBatchAndAtUnalignedAddresses) {
  constexpr std::size_t kNumel = 5000;
  std::vector<float> source(kNumel, 1.0F);
  for (const std::size_t i : {0U, 1023U, 1024U, 4999U}) source[i] = 1e6F + static_cast<float>(i);
  for (const std::size_t i : {1U, 1022U, 1025U}) source[i] = 1e-12F;
  std::vector<std::byte> shifted(kNumel * 4 + 1);
  std::memcpy(shifted.data() + 1, source.data(), kNumel * 4);
  std::vector<std::byte> codes(kNumel * 2);
  for (const auto bytes :
       {std::as_bytes(std::span(source)), std::span<const std::byte>(shifted).subspan(1)}) {
    const CastLosses losses = cast_and_count(DType::float32, bytes, DType::float16, codes,
                                             TooLarge::becomes_largest_finite);
    EXPECT_EQ(losses.num_too_large, 4);
    EXPECT_EQ(losses.largest_magnitude, 1004999.0);
    EXPECT_EQ(losses.num_became_zero, 3);
  }
}

TEST(CastLossesTest, WiderDtypesNeedNoCheck) {
  EXPECT_FALSE(can_overflow(DType::bfloat16, DType::float32));
  EXPECT_FALSE(can_overflow(DType::float16, DType::bfloat16));
  EXPECT_FALSE(can_overflow(DType::float8_e5m2, DType::float16));
  EXPECT_FALSE(can_overflow(DType::uint64, DType::float32));
  EXPECT_FALSE(can_overflow(DType::float32, DType::float64));
  EXPECT_FALSE(can_overflow(DType::float32, DType::float32));
  EXPECT_TRUE(can_overflow(DType::float32, DType::bfloat16));
  EXPECT_TRUE(can_overflow(DType::bfloat16, DType::float16));
  EXPECT_TRUE(can_overflow(DType::float8_e5m2, DType::float8_e4m3fn));
  EXPECT_TRUE(can_overflow(DType::float8_e8m0fnu, DType::float16));
  EXPECT_TRUE(can_overflow(DType::complex128, DType::complex64));
}

TEST(CastLossesTest, DtypesWithSmallerNumbersKeepAll) {
  EXPECT_FALSE(can_underflow(DType::bfloat16, DType::float32));
  EXPECT_FALSE(can_underflow(DType::float16, DType::bfloat16));
  EXPECT_FALSE(can_underflow(DType::float8_e5m2, DType::float16));
  EXPECT_FALSE(can_underflow(DType::float8_e4m3fn, DType::float8_e5m2));
  EXPECT_FALSE(can_underflow(DType::uint64, DType::float32));
  EXPECT_FALSE(can_underflow(DType::float32, DType::float64));
  EXPECT_FALSE(can_underflow(DType::float32, DType::float32));
  EXPECT_TRUE(can_underflow(DType::float32, DType::bfloat16));
  EXPECT_TRUE(can_underflow(DType::bfloat16, DType::float16));
  EXPECT_TRUE(can_underflow(DType::float8_e5m2, DType::float8_e4m3fn));
  EXPECT_TRUE(can_underflow(DType::float8_e8m0fnu, DType::float16));
  EXPECT_TRUE(can_underflow(DType::complex128, DType::complex64));
}

TEST(CastTest, OnlyMeaningfulCastsAreOffered) {
  EXPECT_TRUE(can_cast(DType::int64, DType::float64));
  EXPECT_FALSE(can_cast(DType::int64, DType::bfloat16));
  EXPECT_FALSE(can_cast(DType::float32, DType::int32));
  EXPECT_FALSE(can_cast(DType::complex64, DType::float32));
  EXPECT_TRUE(can_cast(DType::complex128, DType::complex64));
  EXPECT_FALSE(can_cast(DType::float4_e2m1fn_x2, DType::float32));
}

}  // namespace
}  // namespace tessera
