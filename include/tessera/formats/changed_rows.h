#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/base/tensor_meta.h"
#include "tessera/layout/region.h"

// [Note: Changed rows] A step changes few rows of an embedding table. So a checkpoint with a base
// can store a piece of a table as a patch: the numbers and the bytes of the rows that differ from
// the base's piece. The new checkpoint has a hard link to the file with that piece ([Note: Base
// checkpoint]). A patch always changes a piece that is stored whole, never another patch. So a
// reader needs one file and one patch, however many checkpoints were each based on the one before.
namespace tessera::formats {

/// The rows of a piece. A row: all its elements with one index in the first dimension.
struct PieceRows {
  std::int64_t num_rows = 0;
  std::int64_t row_numel = 0;
  std::uint64_t row_nbytes = 0;

  /// Returns how many rows a patch may have at most, so that it takes at most a quarter of the
  /// piece's bytes. A row in a patch takes its own bytes and 8 bytes for its number.
  std::int64_t max_patch_rows() const;
  friend bool operator==(const PieceRows&, const PieceRows&) = default;
};

/// Returns the rows of a piece, or nothing if the piece cannot have a patch. It can if it is a box
/// with two or more rows, all columns of the tensor, and 1 byte to 1 MiB in each row.
std::optional<PieceRows> rows_of(const Region& region, const TensorMeta& meta);

/// As `rows_of`, but also returns nothing for a piece of less than 64 KiB, because a patch of such
/// a piece would save little.
std::optional<PieceRows> rows_to_patch(const Region& region, const TensorMeta& meta);

/// A set of rows of one piece, numbered from 0 within it. Takes one bit for each row of the piece.
class RowSet {
 public:
  RowSet() = default;
  explicit RowSet(std::int64_t num_rows)
      : num_rows_(num_rows), words_((static_cast<std::size_t>(num_rows) + kBits - 1) / kBits) {}

  /// Adds a row, which may be in the set already. Requires: `0 <= row < num_rows()`.
  void insert(std::int64_t row);
  /// Returns the number of rows in the set.
  std::int64_t count() const { return count_; }
  /// Returns the number of rows in the piece.
  std::int64_t num_rows() const { return num_rows_; }

  /// Calls `visit(row)` for the set's rows in `[begin, end)`, in order. Needs `end <= num_rows()`.
  template <class Visit>
  void for_each(std::int64_t begin, std::int64_t end, const Visit& visit) const {
    for (std::int64_t row = next(begin); row < end; row = next(row + 1)) visit(row);
  }

  friend bool operator==(const RowSet&, const RowSet&) = default;

 private:
  static constexpr std::size_t kBits = 64;

  /// Returns the first row of the set that is at or after `row`; num_rows() if the set has none.
  std::int64_t next(std::int64_t row) const;

  std::int64_t num_rows_ = 0;
  std::int64_t count_ = 0;
  std::vector<std::uint64_t> words_;
};

}  // namespace tessera::formats
