#include "formats/native/stored_blocks.h"

#include <algorithm>

#include "base/digest.h"
#include "formats/native/checksum_text.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

// How many blocks one call reads. With few blocks, the bytes are still in the processor's cache
// when their checksums are checked.
constexpr std::uint64_t kBlocksPerRead = 8;
/// Copies the bytes of `wanted` that are in `block` (a range of the piece) to their place in `out`.
void copy_wanted(ByteRange block, std::span<const std::byte> bytes, ByteRange wanted,
                 std::span<std::byte> out) {
  const std::uint64_t begin = std::max(block.begin, wanted.begin);
  const std::uint64_t end = std::min(block.end, wanted.end);
  std::ranges::copy(bytes.subspan(begin - block.begin, end - begin),
                    out.begin() + static_cast<std::ptrdiff_t>(begin - wanted.begin));
}

/// Reads blocks directly into `out`. If only a part of the first or last block is wanted, reads
/// that block into a buffer, and copies the part.
void read_plain_blocks(const ReadableFile& file, const std::string& fqn, const BlockGrid& grid,
                       std::uint64_t first_block, std::span<const StoredBlock> entries,
                       ByteRange wanted, std::span<std::byte> out) {
  const auto is_whole = [&](std::size_t i) {
    const ByteRange block = grid.block(first_block + i);
    return block.begin >= wanted.begin && block.end <= wanted.end;
  };
  for (std::size_t i = 0; i < entries.size();) {
    const ByteRange block = grid.block(first_block + i);
    if (!is_whole(i)) {
      thread_local std::vector<std::byte> buffer;
      buffer.resize(block.nbytes());
      file.read_at(entries[i].range.begin, buffer);
      require_checksum(file, fqn, entries[i], buffer);
      copy_wanted(block, buffer, wanted, out);
      ++i;
      continue;
    }
    std::size_t end = i + 1;
    while (end < entries.size() && end - i < kBlocksPerRead && is_whole(end)) ++end;
    const auto bytes = out.subspan(block.begin - wanted.begin,
                                   grid.block(first_block + end - 1).end - block.begin);
    file.read_at(entries[i].range.begin, bytes);
    for (std::size_t at = 0; i < end; ++i) {
      const std::size_t nbytes = entries[i].range.nbytes();
      require_checksum(file, fqn, entries[i], bytes.subspan(at, nbytes));
      at += nbytes;
    }
  }
}

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

void read_plain_range(const ReadableFile& file, const std::string& fqn, const StoredPiece& stored,
                      const BlockGrid& grid, ByteRange wanted, std::span<std::byte> out) {
  const std::uint64_t first = wanted.begin / grid.block_nbytes;
  const std::uint64_t last = (wanted.end - 1) / grid.block_nbytes + 1;
  for (std::uint64_t block = first; block < last; block += kEntriesPerRead) {
    const auto entries =
        read_block_entries(file, fqn, stored, grid, block, std::min(block + kEntriesPerRead, last));
    read_plain_blocks(file, fqn, grid, block, entries, wanted, out);
  }
}

}  // namespace tessera::formats::native
