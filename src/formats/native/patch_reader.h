#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"
#include "tessera/base/tensor_meta.h"

namespace tessera::formats::native {

/// Reads the numbers of the rows of a patch, in order, and checks them. Calls `sink` with parts of
/// at most kPlainBlockNbytes. Throws: Error(corruption) with file and tensor if a checksum is
/// wrong, or if the numbers are not ascending or not below `rows.num_rows`.
void read_row_numbers(const ReadableFile& file, const TensorMeta& meta, const StoredPatch& patch,
                      const PieceRows& rows,
                      const std::function<void(std::span<const std::uint64_t>)>& sink);

/// Reads the patch of a piece ([Note: Patched pieces]). Keeps one number in memory for each 8192
/// rows of the patch. Thread-safe.
class PatchReader {
 public:
  /// Reads all numbers of the patch's rows. `file`, which has the patch, and `meta`, of the piece's
  /// tensor, must outlive this object. Throws: as read_row_numbers.
  PatchReader(const ReadableFile& file, const TensorMeta& meta, const StoredPatch& patch,
              const PieceRows& rows);

  /// Writes the changed rows over the old ones in `bytes`: the elements `range` of the piece.
  void apply(FlatRange range, std::span<std::byte> bytes) const;

 private:
  void read_rows(std::uint64_t first, std::span<const std::uint64_t> numbers, ByteRange wanted,
                 std::span<std::byte> bytes) const;

  const ReadableFile& file_;
  const TensorMeta& meta_;
  const StoredPatch patch_;
  const PieceRows rows_;
  std::vector<std::uint64_t> first_numbers_;  // of each block of numbers
};

}  // namespace tessera::formats::native
