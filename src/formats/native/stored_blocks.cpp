#include "formats/native/stored_blocks.h"

#include <cstring>

#include "base/digest.h"
#include "formats/native/checksum_text.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

/// Throws if the range of a chunk is impossible. The range was read from the file, so it may be
/// damaged.
void validate_chunk(const ReadableFile& file, const std::string& fqn, const BlockGrid& grid,
                    ByteRange entry, std::uint64_t begin, std::uint64_t nbytes) {
  if (nbytes == 0 || nbytes > grid.block_nbytes) {
    throw Error::expected(
        ErrorKind::corruption, {.path = file.path(), .fqn = fqn, .byte_range = entry}, "chunk size",
        "1 to " + std::to_string(grid.block_nbytes) + " bytes", std::to_string(nbytes), "damaged");
  }
  if (begin < kHeaderNbytes || begin > file.nbytes() || nbytes > file.nbytes() - begin) {
    throw Error::expected(
        ErrorKind::corruption, {.path = file.path(), .fqn = fqn, .byte_range = entry},
        "chunk range",
        "within [" + std::to_string(kHeaderNbytes) + ", " + std::to_string(file.nbytes()) + ")",
        std::to_string(nbytes) + " bytes at " + std::to_string(begin), "damaged");
  }
}

}  // namespace

std::vector<StoredBlock> read_block_entries(const ReadableFile& file, const std::string& fqn,
                                            const StoredPiece& stored, const BlockGrid& grid,
                                            std::uint64_t begin, std::uint64_t end) {
  if (begin == end) return {};
  if (grid.num_blocks() == 1) {
    return {{{stored.begin, stored.begin + stored.stored_nbytes}, stored.checksum_or_table}};
  }
  const std::uint64_t entry_nbytes = table_entry_nbytes(stored.encoding);
  const std::size_t numbers_per_entry = entry_nbytes / sizeof(std::uint64_t);
  std::vector<std::uint64_t> numbers((end - begin) * numbers_per_entry);
  const std::uint64_t table_begin = stored.checksum_or_table + begin * entry_nbytes;
  file.read_at(table_begin, std::as_writable_bytes(std::span(numbers)));

  std::vector<StoredBlock> blocks(end - begin);
  for (std::uint64_t i = 0; i < blocks.size(); ++i) {
    const std::uint64_t* entry = numbers.data() + i * numbers_per_entry;
    if (stored.encoding == Encoding::plain) {
      const ByteRange block = grid.block(begin + i);
      blocks[i] = {{stored.begin + block.begin, stored.begin + block.end}, entry[0]};
      continue;
    }
    const std::uint64_t entry_begin = table_begin + i * entry_nbytes;
    validate_chunk(file, fqn, grid, {entry_begin, entry_begin + entry_nbytes}, entry[0], entry[1]);
    blocks[i] = {{entry[0], entry[0] + entry[1]}, entry[2]};
  }
  return blocks;
}

void require_checksum(const ReadableFile& file, const std::string& fqn, const StoredBlock& block,
                      std::span<const std::byte> bytes) {
  const std::uint64_t checksum = xxh3_64(bytes);
  if (checksum == block.checksum) return;
  throw Error::expected(ErrorKind::corruption,
                        {.path = file.path(), .fqn = fqn, .byte_range = block.range}, "checksum",
                        checksum_text(block.checksum), checksum_text(checksum), "damaged");
}

}  // namespace tessera::formats::native
