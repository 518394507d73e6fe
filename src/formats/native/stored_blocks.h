#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native {

/// A block or chunk as it lies in the file.
struct StoredBlock {
  ByteRange range;
  std::uint64_t checksum = 0;
};

/// Returns blocks `[begin, end)` of a piece: from the index where there is but one, else from the
/// file's table, of which only these entries are read.
/// Throws: Error(corruption) naming `fqn` where an entry lies outside of the file.
std::vector<StoredBlock> read_block_entries(const ReadableFile& file, const std::string& fqn,
                                            const StoredPiece& stored, const BlockGrid& grid,
                                            std::uint64_t begin, std::uint64_t end);

/// Throws Error(corruption) with file, tensor and byte range unless the bytes of the block have its
/// checksum.
void require_checksum(const ReadableFile& file, const std::string& fqn, const StoredBlock& block,
                      std::span<const std::byte> bytes);

}  // namespace tessera::formats::native
