#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/inspect/tensor_reader.h"
#include "tessera/layout/region.h"

namespace tessera::arithmetic {

/// How codes (the elements of a quantized weight), or zero points, are stored.
enum class CodeForm {
  elements,        // each one is an element of its tensor
  fp4_pairs,       // two float4_e2m1 in a byte, the lower 4 bits first
  signed_columns,  // signed integers, stored plus 2^(bits-1); a word has several columns of one row
  signed_rows,     // the same, but a word has several rows of one column
  columns,         // unsigned integers; a word has several columns of one row
  rows,            // the same, but a word has several rows of one column
  awq_columns,     // unsigned integers of 4 bits; a word has eight columns of a row, in AWQ's order
};

/// How integers are packed into words of 32 bits.
struct IntegerPacking {
  int bits = 8;  // the length of each integer
  /// Whether an integer that does not fit into the rest of a word begins in the next word. If
  /// false, this word has its first bits, and the next word has the others.
  bool has_whole_integers = false;

  /// Returns the position of an integer's first bit, counted from the start of the first word.
  std::int64_t bit_of(std::int64_t index) const {
    const std::int64_t per_word = 32 / bits;
    return has_whole_integers ? index / per_word * 32 + index % per_word * bits : index * bits;
  }
  /// Returns how many words `numel` integers fill.
  std::int64_t num_words(std::int64_t numel) const {
    return numel == 0 ? 0 : (bit_of(numel - 1) + bits + 31) / 32;
  }
};

/// Matrices of codes with their scales: `number = (code - zero) * scale`, times the factor of the
/// column if there is one. Rows and columns are those of the stored codes. Immutable, so
/// thread-safe.
struct QuantizedMatrix {
  std::int64_t num_matrices = 1;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;

  inspect::TensorReader codes;
  CodeForm form = CodeForm::elements;
  IntegerPacking packing{};  // of codes and zero points that are packed integers

  inspect::TensorReader scales;  // [matrices, rows of blocks, columns of blocks]
  std::int64_t block_rows = 1;   // rows that share a scale
  std::int64_t block_columns = 1;
  bool are_exponents = false;  // scales are stored as uint8: exponents of 2, plus 127
  float scale_factor = 1.0F;   // multiplies the scales
  float scale_divisor = 1.0F;  // divides the scales

  std::optional<inspect::TensorReader> zeros{};  // zero points, one for each scale
  CodeForm zero_form = CodeForm::elements;
  float zero_added = 0.0F;              // is added to each stored zero point
  std::vector<float> column_factors{};  // multiply the numbers of each column; empty: none
  std::vector<std::int32_t>
      row_blocks{};  // of each row: the index of its row of blocks; empty: row / block_rows

  std::int64_t num_block_rows() const {
    return row_blocks.empty() ? (num_rows + block_rows - 1) / block_rows : num_row_blocks;
  }
  std::int64_t num_block_columns() const {
    return (num_columns + block_columns - 1) / block_columns;
  }
  std::int64_t num_row_blocks = 0;  // used if `row_blocks` is not empty

  /// Fills `out` with the numbers of some rows and columns of one matrix, row by row. Computes in
  /// float32, as the libraries that wrote the codes do. Returns the positions in `out` of numbers
  /// that float32 cannot hold, although codes, zero points and scales are finite. Such a number
  /// becomes infinity with its sign.
  std::vector<std::size_t> decode(std::int64_t matrix, FlatRange rows, FlatRange columns,
                                  std::span<float> out) const;
};

}  // namespace tessera::arithmetic
