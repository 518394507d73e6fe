#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/byte_buffer.h"
#include "formats/native/h5_calls.h"

namespace tessera::formats::native {

/// A chunk as it is stored. Views the encoder's memory.
struct EncodedChunk {
  h5::ChunkForm form = h5::ChunkForm::raw;
  std::span<const std::byte> stored;
};

/// Shuffles and compresses chunks of `chunk_nbytes`, the last one of a piece padded with zeros.
/// Keeps its buffers from chunk to chunk. Not thread-safe: one per thread.
class ChunkEncoder {
 public:
  ChunkEncoder();
  ~ChunkEncoder();
  ChunkEncoder(const ChunkEncoder&) = delete;
  ChunkEncoder& operator=(const ChunkEncoder&) = delete;

  /// Without a level, each chunk gets the encoding that suits it: Huffman codes for each plane of
  /// bytes, also with matches if there are runs. The result is valid until the next call. Equal
  /// bytes give equal results, independent of earlier calls.
  EncodedChunk encode(std::span<const std::byte> elements, std::uint64_t itemsize,
                      std::uint64_t chunk_nbytes, std::optional<int> zstd_level);

 private:
  std::span<const std::byte> compress_as_it_suits(std::span<const std::byte> planes,
                                                  std::uint64_t plane_nbytes);
  std::span<const std::byte> compress_at_level(std::span<const std::byte> planes, int level);
  /// Writes only Huffman codes, in blocks with bytes of one plane each: each plane has its own
  /// distribution of bytes, and a plane of noise is recognized fast and copied.
  std::span<const std::byte> compress_without_matching(std::span<const std::byte> planes,
                                                       std::uint64_t plane_nbytes);

  void* context_;  // ZSTD_CCtx
  std::vector<std::byte> padded_;
  tessera::detail::ByteBuffer planes_;
  tessera::detail::ByteBuffer matched_frame_;
  tessera::detail::ByteBuffer coded_frame_;
};

/// Throws Error(corruption), with an empty `where`, unless the stored bytes are a chunk of
/// `chunk_nbytes`: by their size if it is raw, by its frame if it is compressed.
void require_chunk_nbytes(std::span<const std::byte> stored, std::uint64_t chunk_nbytes);

/// Decodes what ChunkEncoder encodes. Keeps its buffers. Not thread-safe: one per thread.
class ChunkDecoder {
 public:
  ChunkDecoder();
  ~ChunkDecoder();
  ChunkDecoder(const ChunkDecoder&) = delete;
  ChunkDecoder& operator=(const ChunkDecoder&) = delete;

  /// Fills `out` with the chunk's elements `[begin, end)`. A chunk with a stored size of
  /// `chunk_nbytes` is raw. Requires: the stored bytes have passed their checksum. Throws:
  /// Error(corruption), with an empty `where`, if the bytes are still not a chunk.
  void decode(std::span<const std::byte> stored, std::uint64_t itemsize, std::uint64_t chunk_nbytes,
              std::uint64_t begin, std::uint64_t end, std::span<std::byte> out);

 private:
  void* context_;  // ZSTD_DCtx
  tessera::detail::ByteBuffer planes_;
};

}  // namespace tessera::formats::native
