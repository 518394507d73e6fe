#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/base/tensor_meta.h"
#include "tessera/layout/region.h"

// [Note: Changed rows] A step changes few rows of an embedding table. So a checkpoint with a base
// can store a piece of a table as a patch: the bytes and the numbers of the rows that differ from
// the base's piece. That piece stays in a file of the base, as linked pieces do ([Note: Base
// checkpoint]). A patch always belongs to a piece that is stored whole, never to another patch, so
// a reader needs one file and one patch, however many checkpoints a series has.
namespace tessera::formats {

/// The rows of a piece: its elements with the same index in the first dimension.
struct PieceRows {
  std::int64_t num_rows = 0;
  std::int64_t row_numel = 0;
  std::uint64_t row_nbytes = 0;

  /// Returns how many rows a patch may have at most. A row of a patch takes its own bytes and 8
  /// bytes for its number; a patch may take a quarter of the piece's bytes.
  std::int64_t max_patch_rows() const;
  friend bool operator==(const PieceRows&, const PieceRows&) = default;
};

/// Returns the rows of a piece, or nothing if it cannot be patched. A piece can be patched if it is
/// a box with two or more rows, all columns of the tensor, and 1 byte to 1 MiB in each row.
std::optional<PieceRows> rows_of(const Region& region, const TensorMeta& meta);

/// As `rows_of`, but also returns nothing for a piece of less than 64 KiB, because a patch of such
/// a piece would save little.
std::optional<PieceRows> rows_to_patch(const Region& region, const TensorMeta& meta);

/// A set of rows of one piece. Takes one bit for each row.
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

  /// Calls `visit(row)` for the rows of the set in `[begin, end)`, in their order.
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
