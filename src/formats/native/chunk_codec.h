#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/byte_buffer.h"
#include "formats/native/h5_calls.h"

namespace tessera::formats::native {

/// A chunk as it is stored. Sees the encoder's memory.
struct EncodedChunk {
  h5::ChunkForm form = h5::ChunkForm::raw;
  std::span<const std::byte> stored;
};

/// Shuffles and compresses chunks of `chunk_nbytes`, the last one of a piece filled up with zeros.
/// Keeps its buffers from chunk to chunk. Not thread-safe: one per thread.
class ChunkEncoder {
 public:
  ChunkEncoder();
  ~ChunkEncoder();
  ChunkEncoder(const ChunkEncoder&) = delete;
  ChunkEncoder& operator=(const ChunkEncoder&) = delete;

  /// Without a level each chunk is encoded in the way that suits it: Huffman codes for each plane
  /// of bytes, or also matches where there are runs. The result is good until the next call. Equal
  /// bytes give equal results, whatever came before.
  EncodedChunk encode(std::span<const std::byte> elements, std::uint64_t itemsize,
                      std::uint64_t chunk_nbytes, std::optional<int> zstd_level);

 private:
  std::span<const std::byte> compress_as_it_suits(std::span<const std::byte> planes,
                                                  std::uint64_t plane_nbytes);
  std::span<const std::byte> compress_at_level(std::span<const std::byte> planes, int level);
  /// Writes Huffman codes alone, in blocks that hold bytes of one plane each: planes differ in the
  /// distribution of their bytes, and one that is noise is found out by a glance and copied.
  std::span<const std::byte> compress_without_matching(std::span<const std::byte> planes,
                                                       std::uint64_t plane_nbytes);

  void* context_;  // ZSTD_CCtx
  std::vector<std::byte> padded_;
  tessera::detail::ByteBuffer planes_;
  tessera::detail::ByteBuffer matched_frame_;
  tessera::detail::ByteBuffer coded_frame_;
};

/// Throws Error(corruption), with an empty `where`, unless the stored bytes say that they are a
/// chunk of `chunk_nbytes`: by their own number where it is raw, by its frame where it is
/// compressed.
void require_chunk_nbytes(std::span<const std::byte> stored, std::uint64_t chunk_nbytes);

/// Undoes ChunkEncoder. Keeps its buffers. Not thread-safe: one per thread.
class ChunkDecoder {
 public:
  ChunkDecoder();
  ~ChunkDecoder();
  ChunkDecoder(const ChunkDecoder&) = delete;
  ChunkDecoder& operator=(const ChunkDecoder&) = delete;

  /// Fills `out` with the chunk's elements `[begin, end)`. A stored size of `chunk_nbytes` says
  /// that the chunk is raw. Requires: the stored bytes have passed their checksum. Throws:
  /// Error(corruption) where they are no chunk all the same, with an empty `where`.
  void decode(std::span<const std::byte> stored, std::uint64_t itemsize, std::uint64_t chunk_nbytes,
              std::uint64_t begin, std::uint64_t end, std::span<std::byte> out);

 private:
  void* context_;  // ZSTD_DCtx
  tessera::detail::ByteBuffer planes_;
};

}  // namespace tessera::formats::native
