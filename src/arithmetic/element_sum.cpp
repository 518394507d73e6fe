// Compiled without fused multiply-add (CMakeLists.txt), so that all machines compute equal sums.
#include "arithmetic/element_sum.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/cast.h"

namespace tessera::arithmetic {
namespace {

/// Converts elements part by part, and calls `visit` with the numbers and where they begin.
template <class Number, class Visit>
void for_each_part(DType dtype, std::span<const std::byte> elements, std::size_t num_numbers,
                   Visit visit) {
  constexpr std::size_t kPart = 2048;
  constexpr DType kNumber = std::is_same_v<Number, double> ? DType::float64 : DType::float32;
  std::array<Number, kPart> numbers;
  const auto size = static_cast<std::size_t>(itemsize(dtype));
  for (std::size_t begin = 0; begin < num_numbers; begin += kPart) {
    const std::span<Number> part = std::span(numbers).first(std::min(kPart, num_numbers - begin));
    cast_elements(dtype, elements.subspan(begin * size, part.size() * size), kNumber,
                  std::as_writable_bytes(part));
    visit(begin, std::span<const Number>(part));
  }
}

}  // namespace

DType number_dtype(DType dtype) {
  switch (dtype) {
    case DType::complex32:
      return DType::float16;
    case DType::complex64:
      return DType::float32;
    case DType::complex128:
      return DType::float64;
    default:
      return dtype;
  }
}

std::size_t numbers_per_element(DType dtype) {
  return is_complex(dtype) ? 2 : 1;
}

bool can_be_summed(DType dtype) {
  if (!is_floating_point(dtype) && !is_complex(dtype)) return false;
  const DType number = number_dtype(dtype);
  return can_cast(number, DType::float64) && can_cast(DType::float64, number);
}

std::vector<std::byte> infinities_of(DType dtype, std::span<const std::byte> elements) {
  const std::size_t num_numbers = elements.size() / itemsize(dtype);
  std::vector<std::byte> result(num_numbers * sizeof(double));
  for_each_part<double>(
      dtype, elements, num_numbers, [&](std::size_t begin, std::span<const double> numbers) {
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          const double mark =
              std::isfinite(numbers[i]) ? 0.0 : std::numeric_limits<double>::quiet_NaN();
          std::memcpy(result.data() + (begin + i) * sizeof(mark), &mark, sizeof(mark));
        }
      });
  return result;
}

template <class Number>
void start_sum(DType dtype, std::span<const std::byte> elements, double weight,
               std::span<Number> sum) {
  const auto factor = static_cast<Number>(weight);
  for_each_part<Number>(dtype, elements, sum.size(),
                        [&](std::size_t begin, std::span<const Number> numbers) {
                          Number* const out = sum.data() + begin;
                          for (std::size_t i = 0; i < numbers.size(); ++i) {
                            out[i] = factor * numbers[i];
                          }
                        });
}

template <class Number>
void add_to_sum(DType dtype, std::span<const std::byte> elements, double keep, double weight,
                std::span<Number> sum) {
  const auto kept = static_cast<Number>(keep);
  const auto factor = static_cast<Number>(weight);
  for_each_part<Number>(dtype, elements, sum.size(),
                        [&](std::size_t begin, std::span<const Number> numbers) {
                          Number* const out = sum.data() + begin;
                          for (std::size_t i = 0; i < numbers.size(); ++i) {
                            out[i] = kept * out[i] + factor * numbers[i];
                          }
                        });
}

template <class Number>
void divide_sum(double divisor, std::span<Number> sum) {
  const auto number = static_cast<Number>(divisor);
  for (Number& each : sum) each /= number;
}

template <class Number>
void add_multiple(Number factor, std::span<const Number> row, std::span<Number> sum) {
  const Number* const in = row.data();
  Number* const out = sum.data();
  for (std::size_t i = 0; i < sum.size(); ++i) out[i] += factor * in[i];
}

template void start_sum(DType, std::span<const std::byte>, double, std::span<double>);
template void start_sum(DType, std::span<const std::byte>, double, std::span<float>);
template void add_to_sum(DType, std::span<const std::byte>, double, double, std::span<double>);
template void add_to_sum(DType, std::span<const std::byte>, double, double, std::span<float>);
template void divide_sum(double, std::span<double>);
template void divide_sum(double, std::span<float>);
template void add_multiple(double, std::span<const double>, std::span<double>);
template void add_multiple(float, std::span<const float>, std::span<float>);

}  // namespace tessera::arithmetic
