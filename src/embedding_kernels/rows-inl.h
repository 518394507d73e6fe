// Operations on rows, for the SIMD instruction sets of highway. highway compiles this file once per
// set, so it has highway's include guard instead of `#pragma once`.
#if defined(TESSERA_EMBEDDING_KERNELS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_EMBEDDING_KERNELS_ROWS_INL_H_
#undef TESSERA_EMBEDDING_KERNELS_ROWS_INL_H_
#else
#define TESSERA_EMBEDDING_KERNELS_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cast.h"
#include "embedding_kernels/small_floats.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::embedding::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Columns at the end of a row that do not fill a whole SIMD vector are handled four at a time, then
// one by one.
using Vectors = hn::ScalableTag<float>;
using Fours = hn::CappedTag<float, 4>;
using Ones = hn::CappedTag<float, 1>;

template <class D>
constexpr std::int64_t num_lanes(D d) {
  return static_cast<std::int64_t>(hn::Lanes(d));
}

// ---- Elements: converted to float32 when read; rounded to nearest, ties to even, when written.

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* elements) {
  return hn::LoadU(d, elements);
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, float* elements) {
  hn::StoreU(v, d, elements);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const BFloat16* elements) {
  const hn::Rebind<std::uint16_t, D> stored;
  const hn::Rebind<std::uint32_t, D> bits;
  const auto codes = hn::LoadU(stored, reinterpret_cast<const std::uint16_t*>(elements));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(bits, codes)));
}

template <class D>
HWY_INLINE void store(D /*d*/, hn::Vec<D> v, BFloat16* elements) {
  const hn::Rebind<std::uint16_t, D> stored;
  const hn::Rebind<std::uint32_t, D> bits;
  const hn::Rebind<std::int32_t, D> code;
  const auto whole = hn::BitCast(bits, v);
  const auto kept = hn::ShiftRight<16>(whole);
  const auto is_odd = hn::And(kept, hn::Set(bits, 1U));
  const auto rounded = hn::ShiftRight<16>(hn::Add(whole, hn::Add(hn::Set(bits, 0x7FFFU), is_odd)));
  // A NaN is not rounded, because rounding could turn it into an infinity.
  const auto quiet_nan = hn::Or(kept, hn::Set(bits, 0x40U));
  const auto codes = hn::IfThenElse(hn::RebindMask(bits, hn::IsNaN(v)), quiet_nan, rounded);
  hn::StoreU(hn::DemoteTo(stored, hn::BitCast(code, codes)), stored,
             reinterpret_cast<std::uint16_t*>(elements));
}

// Without float16 instructions, highway's conversion has no infinities and rounds towards zero. So
// other processors use Tessera's own conversion, which is slower.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || (HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64)

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Float16* elements) {
  const hn::Rebind<hwy::float16_t, D> stored;
  return hn::PromoteTo(d, hn::LoadU(stored, reinterpret_cast<const hwy::float16_t*>(elements)));
}

template <class D>
HWY_INLINE void store(D /*d*/, hn::Vec<D> v, Float16* elements) {
  const hn::Rebind<hwy::float16_t, D> stored;
  hn::StoreU(hn::DemoteTo(stored, v), stored, reinterpret_cast<hwy::float16_t*>(elements));
}

#else

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Float16* elements) {
  HWY_ALIGN float converted[HWY_LANES(float)];
  const std::size_t lanes = hn::Lanes(d);
  cast_elements(DType::float16, std::as_bytes(std::span(elements, lanes)), DType::float32,
                std::as_writable_bytes(std::span(converted, lanes)));
  return hn::Load(d, converted);
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, Float16* elements) {
  HWY_ALIGN float converted[HWY_LANES(float)];
  const std::size_t lanes = hn::Lanes(d);
  hn::Store(v, d, converted);
  cast_elements(DType::float32, std::as_bytes(std::span(converted, lanes)), DType::float16,
                std::as_writable_bytes(std::span(elements, lanes)));
}

#endif

// ---- Memory: rows are read in random order, so each row is prefetched some rows before its use.

constexpr std::int64_t kCacheLineNbytes = 64;
constexpr std::int64_t kPrefetchNbytes = 4096;  // prefetch about this far ahead

/// Returns how many rows ahead to prefetch.
template <class T>
HWY_INLINE std::int64_t rows_ahead(std::int64_t dim) {
  const std::int64_t nbytes = dim * static_cast<std::int64_t>(sizeof(T));
  return HWY_MIN(HWY_MAX(kPrefetchNbytes / HWY_MAX(nbytes, 1), 4), 32);
}

template <class T>
HWY_INLINE void prefetch_to_read(const T* elements, std::int64_t numel) {
  const auto* bytes = reinterpret_cast<const char*>(elements);
  const auto nbytes = numel * static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t i = 0; i < nbytes; i += kCacheLineNbytes) __builtin_prefetch(bytes + i, 0, 3);
}

template <class T>
HWY_INLINE void prefetch_to_write(const T* elements, std::int64_t numel) {
  const auto* bytes = reinterpret_cast<const char*>(elements);
  const auto nbytes = numel * static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t i = 0; i < nbytes; i += kCacheLineNbytes) __builtin_prefetch(bytes + i, 1, 3);
}

// ---- Rows.

/// Calls `body(d, column)` for the columns of a row, one SIMD vector after the other.
template <class Body>
HWY_INLINE void for_columns(std::int64_t dim, const Body& body) {
  const Vectors vectors;
  const Fours fours;
  const Ones ones;
  std::int64_t column = 0;
  for (; column + num_lanes(vectors) <= dim; column += num_lanes(vectors)) body(vectors, column);
  for (; column + num_lanes(fours) <= dim; column += num_lanes(fours)) body(fours, column);
  for (; column < dim; ++column) body(ones, column);
}

/// Sums as many columns as fit into `kVectors` SIMD vectors, which stay in registers.
template <int kVectors, class D, class Rows>
HWY_INLINE void sum_columns(D d, const Rows& rows, std::int64_t begin, std::int64_t end,
                            std::int64_t column, float* HWY_RESTRICT out) {
  const std::int64_t lanes = num_lanes(d);
  hn::Vec<D> sums[std::size_t{kVectors}];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sums[v] = hn::Zero(d);
  for (std::int64_t i = begin; i < end; ++i) {
    prefetch_to_read(rows.row_ahead(i) + column, kVectors * lanes);
    const auto* row = rows.row(i) + column;
    const auto weight = hn::Set(d, rows.weight(i));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = hn::MulAdd(weight, load(d, row + v * lanes), sums[v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(d, sums[v], out + column + v * lanes);
}

/// Sets `out[0, dim)` to the sum over i in [begin, end), in order, of weight(i) * row(i). `Rows`
/// has `weight(i)`, `row(i)`, and `row_ahead(i)`: the row to prefetch meanwhile.
template <class Rows>
HWY_INLINE void sum_rows(const Rows& rows, std::int64_t begin, std::int64_t end, std::int64_t dim,
                         float* HWY_RESTRICT out) {
  const Vectors vectors;
  const Fours fours;
  const Ones ones;
  const std::int64_t lanes = num_lanes(vectors);
  std::int64_t column = 0;
  for (; column + 8 * lanes <= dim; column += 8 * lanes) {
    sum_columns<8>(vectors, rows, begin, end, column, out);
  }
  if (column + 4 * lanes <= dim) {
    sum_columns<4>(vectors, rows, begin, end, column, out);
    column += 4 * lanes;
  }
  if (column + 2 * lanes <= dim) {
    sum_columns<2>(vectors, rows, begin, end, column, out);
    column += 2 * lanes;
  }
  if (column + lanes <= dim) {
    sum_columns<1>(vectors, rows, begin, end, column, out);
    column += lanes;
  }
  for (; column + num_lanes(fours) <= dim; column += num_lanes(fours)) {
    sum_columns<1>(fours, rows, begin, end, column, out);
  }
  for (; column < dim; ++column) sum_columns<1>(ones, rows, begin, end, column, out);
}

/// Returns the sum of a[k] * b[k]. The order of the sum depends on the SIMD vector size.
template <class T>
HWY_INLINE float product(const float* a, const T* b, std::int64_t dim) {
  const Vectors vectors;
  const std::int64_t lanes = num_lanes(vectors);
  auto sums = hn::Zero(vectors);
  std::int64_t column = 0;
  for (; column + lanes <= dim; column += lanes) {
    sums = hn::MulAdd(load(vectors, a + column), load(vectors, b + column), sums);
  }
  float sum = hn::GetLane(hn::SumOfLanes(vectors, sums));
  const Ones ones;
  for (; column < dim; ++column) {
    sum += a[column] * hn::GetLane(load(ones, b + column));
  }
  return sum;
}

}  // namespace tessera::embedding::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
