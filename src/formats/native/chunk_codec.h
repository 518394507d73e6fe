#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/byte_buffer.h"
#include "formats/native/h5_calls.h"

namespace tessera::formats::native {

/// A chunk in its stored form. `stored`: a view of the encoder's memory, or of the elements if raw.
struct EncodedChunk {
  h5::ChunkForm form = h5::ChunkForm::raw;
  std::span<const std::byte> stored;
};

/// Shuffles and compresses chunks of `chunk_nbytes`. Pads the last chunk of a piece with zeros.
/// Uses its buffers again for the next chunk. Not thread-safe: each thread needs its own.
class ChunkEncoder {
 public:
  ChunkEncoder();
  ~ChunkEncoder();
  ChunkEncoder(const ChunkEncoder&) = delete;
  ChunkEncoder& operator=(const ChunkEncoder&) = delete;

  /// Encodes one chunk. With a `zstd_level`, compresses at this level. Without, compresses each
  /// plane of bytes with Huffman codes only; if the result is smaller than half of the chunk, also
  /// tries a zstd level that searches for repetitions, and keeps the smaller result. If compression
  /// saves less than 1/16, returns the chunk raw. The result is valid until the next call, if
  /// `elements` live so long. Equal bytes give equal results, whatever was encoded before.
  EncodedChunk encode(std::span<const std::byte> elements, std::uint64_t itemsize,
                      std::uint64_t chunk_nbytes, std::optional<int> zstd_level);

 private:
  std::span<const std::byte> compress_as_it_suits(std::span<const std::byte> planes,
                                                  std::uint64_t plane_nbytes);
  std::span<const std::byte> compress_at_level(std::span<const std::byte> planes, int level);
  /// Compresses with Huffman codes only. Each block holds bytes of one plane, because each plane
  /// has its own distribution of bytes. zstd quickly recognizes a plane of noise, and copies it.
  std::span<const std::byte> compress_without_matching(std::span<const std::byte> planes,
                                                       std::uint64_t plane_nbytes);

  void* context_;  // ZSTD_CCtx
  std::vector<std::byte> padded_;
  tessera::detail::ByteBuffer planes_;
  tessera::detail::ByteBuffer matched_frame_;
  tessera::detail::ByteBuffer coded_frame_;
};

/// Throws Error(corruption), with an empty `where`, unless the stored bytes are `chunk_nbytes` long
/// (a raw chunk), or begin with the header of a zstd frame of this size. Decodes nothing.
void require_chunk_nbytes(std::span<const std::byte> stored, std::uint64_t chunk_nbytes);

/// Decodes what ChunkEncoder encodes. Uses its buffers again for the next chunk. Not thread-safe:
/// each thread needs its own.
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
