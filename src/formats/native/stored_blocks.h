#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native {

/// The place and checksum of a block or chunk in the file.
struct StoredBlock {
  ByteRange range;
  std::uint64_t checksum = 0;
};

/// Returns the places and checksums of blocks `[begin, end)` of a piece. If the piece has only one
/// block, the index has this entry. Otherwise reads the entries from the table in the file, and no
/// others. Throws: Error(corruption) naming `fqn` if an entry is outside the file.
std::vector<StoredBlock> read_block_entries(const ReadableFile& file, const std::string& fqn,
                                            const StoredPiece& stored, const BlockGrid& grid,
                                            std::uint64_t begin, std::uint64_t end);

/// Throws Error(corruption) with file, tensor and byte range unless the bytes match the block's
/// checksum.
void require_checksum(const ReadableFile& file, const std::string& fqn, const StoredBlock& block,
                      std::span<const std::byte> bytes);

}  // namespace tessera::formats::native
