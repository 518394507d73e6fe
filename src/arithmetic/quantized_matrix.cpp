// Compiled without fused multiply-add (CMakeLists.txt), so that all machines compute equal numbers.
#include "arithmetic/quantized_matrix.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "base/cast.h"

namespace tessera::arithmetic {
namespace {

using inspect::TensorReader;

constexpr std::array<float, 16> kFloat4 = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                           -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};
// Where AWQ puts each of eight columns in a word, in units of 4 bits.
constexpr std::array<unsigned, 8> kAwqPlaces = {0, 4, 1, 5, 2, 6, 3, 7};

std::int64_t divided_up(std::int64_t number, std::int64_t divisor) {
  return (number + divisor - 1) / divisor;
}

/// The elements in some rows and columns of a tensor, one row after another.
struct Table {
  std::vector<std::byte> bytes;
  std::int64_t width;

  std::uint32_t word(std::int64_t row, std::int64_t column) const {
    std::uint32_t result = 0;
    std::memcpy(&result, bytes.data() + (row * width + column) * 4, sizeof(result));
    return result;
  }
  unsigned byte(std::int64_t row, std::int64_t column) const {
    return std::to_integer<unsigned>(bytes[static_cast<std::size_t>(row * width + column)]);
  }
};

/// Reads a part of a tensor that has `width` elements in a row.
Table read_table(const TensorReader& tensor, std::int64_t width, FlatRange rows,
                 FlatRange columns) {
  const auto size = static_cast<std::int64_t>(itemsize(tensor.meta().dtype));
  Table table{
      std::vector<std::byte>(static_cast<std::size_t>(rows.numel() * columns.numel() * size)),
      columns.numel()};
  const bool is_dense = columns.numel() == width;
  const std::int64_t at_once = is_dense ? rows.numel() * width : columns.numel();
  const std::int64_t num_reads = is_dense ? 1 : rows.numel();
  for (std::int64_t i = 0; i < num_reads && at_once > 0; ++i) {
    const std::int64_t begin = (rows.begin + i) * width + columns.begin;
    tensor.read({begin, begin + at_once}, std::span(table.bytes)
                                              .subspan(static_cast<std::size_t>(i * at_once * size),
                                                       static_cast<std::size_t>(at_once * size)));
  }
  return table;
}

/// The rows and columns of one matrix that are to be decoded, and where the matrix is in the
/// tensor.
struct Wanted {
  std::int64_t first_table_row;  // of the matrix in the tensor of codes
  std::int64_t num_rows;         // of the whole matrix
  std::int64_t num_columns;
  FlatRange rows;
  FlatRange columns;
};

void decode_elements(const TensorReader& codes, const Wanted& wanted, std::span<float> out) {
  const Table table = read_table(
      codes, wanted.num_columns,
      {wanted.first_table_row + wanted.rows.begin, wanted.first_table_row + wanted.rows.end},
      wanted.columns);
  cast_elements(codes.meta().dtype, table.bytes, DType::float32, std::as_writable_bytes(out));
}

void decode_pairs(const TensorReader& codes, const Wanted& wanted, std::span<float> out) {
  const FlatRange bytes{wanted.columns.begin / 2, divided_up(wanted.columns.end, 2)};
  const Table table = read_table(
      codes, divided_up(wanted.num_columns, 2),
      {wanted.first_table_row + wanted.rows.begin, wanted.first_table_row + wanted.rows.end},
      bytes);
  std::size_t i = 0;
  for (std::int64_t r = 0; r < wanted.rows.numel(); ++r) {
    for (std::int64_t c = wanted.columns.begin; c < wanted.columns.end; ++c) {
      const unsigned pair = table.byte(r, c / 2 - bytes.begin);
      out[i++] = kFloat4[c % 2 == 0 ? pair & 0xFU : pair >> 4];
    }
  }
}

/// Returns one of the integers that are packed into words; `at(i)` returns word i.
template <class Words>
std::uint32_t packed_at(Words at, std::int64_t index, IntegerPacking packing) {
  const std::int64_t bit = packing.bit_of(index);
  const auto shift = static_cast<unsigned>(bit % 32);
  std::uint32_t value = at(bit / 32) >> shift;
  if (shift + static_cast<unsigned>(packing.bits) > 32) value |= at(bit / 32 + 1) << (32 - shift);
  return value & ((1U << packing.bits) - 1U);
}

/// Returns the words that have the bits of the integers `range`.
FlatRange words_of(FlatRange range, IntegerPacking packing) {
  return {packing.bit_of(range.begin) / 32, packing.num_words(range.end)};
}

void decode_columns(const TensorReader& codes, const Wanted& wanted, IntegerPacking packing,
                    bool is_awq, float subtracted, std::span<float> out) {
  const FlatRange words =
      is_awq ? FlatRange{wanted.columns.begin / 8, divided_up(wanted.columns.end, 8)}
             : words_of(wanted.columns, packing);
  const Table table = read_table(
      codes, packing.num_words(wanted.num_columns),
      {wanted.first_table_row + wanted.rows.begin, wanted.first_table_row + wanted.rows.end},
      words);
  std::size_t i = 0;
  for (std::int64_t r = 0; r < wanted.rows.numel(); ++r) {
    const auto word = [&](std::int64_t index) { return table.word(r, index - words.begin); };
    for (std::int64_t c = wanted.columns.begin; c < wanted.columns.end; ++c) {
      const std::uint32_t code =
          is_awq ? (word(c / 8) >> (4 * kAwqPlaces[static_cast<std::size_t>(c % 8)])) & 0xFU
                 : packed_at(word, c, packing);
      out[i++] = static_cast<float>(code) - subtracted;
    }
  }
}

void decode_rows(const TensorReader& codes, const Wanted& wanted, std::int64_t matrix,
                 IntegerPacking packing, float subtracted, std::span<float> out) {
  const std::int64_t in_matrix = packing.num_words(wanted.num_rows);
  const FlatRange words = words_of(wanted.rows, packing);
  const Table table = read_table(codes, wanted.num_columns,
                                 {matrix * in_matrix + words.begin, matrix * in_matrix + words.end},
                                 wanted.columns);
  std::size_t i = 0;
  for (std::int64_t r = wanted.rows.begin; r < wanted.rows.end; ++r) {
    for (std::int64_t c = 0; c < wanted.columns.numel(); ++c) {
      const auto word = [&](std::int64_t index) { return table.word(index - words.begin, c); };
      out[i++] = static_cast<float>(packed_at(word, r, packing)) - subtracted;
    }
  }
}

/// Fills `out` with the codes as numbers (integers or small floats). `matrix`: index of the matrix.
void decode_codes(const TensorReader& codes, CodeForm form, IntegerPacking packing,
                  std::int64_t matrix, const Wanted& wanted, std::span<float> out) {
  const auto half = static_cast<float>(1U << (packing.bits - 1));
  switch (form) {
    case CodeForm::elements:
      return decode_elements(codes, wanted, out);
    case CodeForm::fp4_pairs:
      return decode_pairs(codes, wanted, out);
    case CodeForm::signed_columns:
      return decode_columns(codes, wanted, packing, false, half, out);
    case CodeForm::columns:
      return decode_columns(codes, wanted, packing, false, 0.0F, out);
    case CodeForm::awq_columns:
      return decode_columns(codes, wanted, {.bits = 4}, true, 0.0F, out);
    case CodeForm::signed_rows:
      return decode_rows(codes, wanted, matrix, packing, half, out);
    case CodeForm::rows:
      return decode_rows(codes, wanted, matrix, packing, 0.0F, out);
  }
}

}  // namespace

std::vector<std::size_t> QuantizedMatrix::decode(std::int64_t matrix, FlatRange rows,
                                                 FlatRange columns, std::span<float> out) const {
  decode_codes(codes, form, packing, matrix,
               {matrix * num_rows, num_rows, num_columns, rows, columns}, out);
  const FlatRange blocks =
      row_blocks.empty() ? FlatRange{rows.begin / block_rows, divided_up(rows.end, block_rows)}
                         : FlatRange{0, num_row_blocks};
  const FlatRange block_range{columns.begin / block_columns,
                              divided_up(columns.end, block_columns)};
  const Wanted wanted{matrix * num_block_rows(), num_block_rows(), num_block_columns(), blocks,
                      block_range};
  std::vector<float> scale(static_cast<std::size_t>(blocks.numel() * block_range.numel()));
  const Table stored = read_table(
      scales, wanted.num_columns,
      {wanted.first_table_row + blocks.begin, wanted.first_table_row + blocks.end}, block_range);
  cast_elements(are_exponents ? DType::float8_e8m0fnu : scales.meta().dtype, stored.bytes,
                DType::float32, std::as_writable_bytes(std::span(scale)));
  std::vector<bool> scale_is_finite(scale.size());  // as it is stored
  for (std::size_t i = 0; i < scale.size(); ++i) {
    scale_is_finite[i] =
        std::isfinite(scale[i]) && std::isfinite(scale_factor) && std::isfinite(scale_divisor);
    if (scale_factor != 1.0F) scale[i] *= scale_factor;
    if (scale_divisor != 1.0F) scale[i] /= scale_divisor;
  }
  std::vector<float> zero(zeros ? scale.size() : 0);
  if (zeros) decode_codes(*zeros, zero_form, packing, matrix, wanted, zero);
  std::vector<std::size_t> overflowed;
  float* number = out.data();
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const std::int64_t block =
        (row_blocks.empty() ? r / block_rows : row_blocks[static_cast<std::size_t>(r)]) -
        blocks.begin;
    const auto first = static_cast<std::size_t>(block * block_range.numel());
    for (std::int64_t c = columns.begin; c < columns.end; ++c, ++number) {
      const auto i = first + static_cast<std::size_t>(c / block_columns - block_range.begin);
      const float code = zeros ? *number - (zero[i] + zero_added) : *number;
      const float factor =
          column_factors.empty() ? 1.0F : column_factors[static_cast<std::size_t>(c)];
      *number = code * scale[i] * factor;
      if (std::isfinite(*number) || !std::isfinite(code) || !scale_is_finite[i]) continue;
      overflowed.push_back(static_cast<std::size_t>(number - out.data()));
      const bool is_negative =
          std::signbit(code) != (std::signbit(scale[i]) != std::signbit(factor));
      *number = std::copysign(std::numeric_limits<float>::infinity(), is_negative ? -1.0F : 1.0F);
    }
  }
  return overflowed;
}

}  // namespace tessera::arithmetic
