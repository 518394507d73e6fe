#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native {

/// How many table entries a reader has in memory at a time.
inline constexpr std::uint64_t kEntriesPerRead = 4096;

/// The place of a block or chunk in the file, and its checksum.
struct StoredBlock {
  ByteRange range;
  std::uint64_t checksum = 0;
};

/// Returns the places and checksums of blocks `[begin, end)` of a piece. If the piece has one
/// block, its entry is in the index. Otherwise reads the entries of these blocks from the table in
/// the file. Throws: Error(corruption) naming `fqn` if an entry is outside the file.
std::vector<StoredBlock> read_block_entries(const ReadableFile& file, const std::string& fqn,
                                            const StoredPiece& stored, const BlockGrid& grid,
                                            std::uint64_t begin, std::uint64_t end);

/// Throws Error(corruption) with file, tensor and byte range if the bytes do not have the checksum
/// of the block.
void require_checksum(const ReadableFile& file, const std::string& fqn, const StoredBlock& block,
                      std::span<const std::byte> bytes);

/// Reads the bytes `wanted` (at least one) of a plain piece to `out`. Checks the blocks with them.
void read_plain_range(const ReadableFile& file, const std::string& fqn, const StoredPiece& stored,
                      const BlockGrid& grid, ByteRange wanted, std::span<std::byte> out);

}  // namespace tessera::formats::native
