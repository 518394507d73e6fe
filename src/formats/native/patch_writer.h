#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/changed_rows.h"
#include "tessera/formats/native.h"

namespace tessera::formats::native {

/// Computes one checksum for each block of a byte range that arrives in parts, in any order. Keeps
/// a block in memory until all of its bytes have arrived. Thread-safe.
class BlockChecksums {
 public:
  explicit BlockChecksums(const BlockGrid& grid) : grid_(grid), checksums_(grid.num_blocks()) {}

  /// Takes the bytes of the range from `begin` on. Requires: they were not taken before.
  void add(std::uint64_t begin, std::span<const std::byte> bytes);
  /// Returns one checksum for each block. Requires: all bytes were taken.
  const std::vector<std::uint64_t>& checksums() const;

 private:
  struct Partial {
    std::vector<std::byte> bytes;
    std::uint64_t num_taken = 0;
  };

  const BlockGrid grid_;
  std::mutex mutex_;
  std::map<std::uint64_t, Partial> partial_;  // key: number of the block
  std::vector<std::uint64_t> checksums_;
};

/// Selects the rows of a patch from the blocks of its piece ([Note: Patched pieces]). Thread-safe.
class PatchWriter {
 public:
  /// `changed` must outlive this object. `block_numel`: elements of a block of the piece, in whole
  /// rows.
  PatchWriter(const RowSet& changed, const PieceRows& rows, std::int64_t block_numel);

  /// Writes the numbers of the changed rows to their place in `file`, and computes their checksums.
  void write_numbers(WritableFile& file, const StoredPatch& patch);

  /// Returns the bytes of the rank file that will hold the changed rows of one block; empty if the
  /// block has none. `begin`: the block's first element, counted from the start of the piece.
  ByteRange place_of_block(const StoredPatch& patch, std::int64_t begin) const;
  /// Copies the changed rows of a block to `out`, which has the size of `place_of_block`.
  void select(std::int64_t begin, std::span<const std::byte> block, std::span<std::byte> out) const;
  /// Adds the changed rows of a block, which `select` gave, to the checksums of the patch's rows.
  void add_rows(std::int64_t begin, std::span<const std::byte> rows);

  const std::vector<std::uint64_t>& number_checksums() const { return numbers_.checksums(); }
  const std::vector<std::uint64_t>& row_checksums() const { return rows_of_patch_.checksums(); }

 private:
  ByteRange range_of_block(std::int64_t begin) const;

  const RowSet& changed_;
  const PieceRows rows_;
  const std::int64_t block_numel_;
  std::vector<std::uint64_t> first_rows_;  // of each block: its first row's place in the patch
  BlockChecksums numbers_;
  BlockChecksums rows_of_patch_;
};

/// Returns how many elements of a patched piece a writer takes in one block: whole rows.
std::int64_t patched_block_numel(const PieceRows& rows, const NativeWriteOptions& options);

}  // namespace tessera::formats::native
