#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/native/h5_calls.h"

namespace tessera::formats::native {

/// Puts the first bytes of all elements first, then all second bytes, and so on: the bytes that
/// are alike come together. Requires: both spans of the same size, a multiple of `itemsize`, apart.
void shuffle_bytes(std::span<const std::byte> elements, std::uint64_t itemsize,
                   std::span<std::byte> planes);

/// Undoes `shuffle_bytes` for elements `[begin, end)` of all those in `planes`.
void unshuffle_bytes(std::span<const std::byte> planes, std::uint64_t itemsize, std::uint64_t begin,
                     std::uint64_t end, std::span<std::byte> elements);

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

  /// The result is good until the next call. Equal bytes give equal results, whatever came before.
  EncodedChunk encode(std::span<const std::byte> elements, std::uint64_t itemsize,
                      std::uint64_t chunk_nbytes, int zstd_level);

 private:
  void* context_;  // ZSTD_CCtx
  std::vector<std::byte> padded_;
  std::vector<std::byte> planes_;
  std::vector<std::byte> frame_;
};

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
  std::vector<std::byte> planes_;
};

}  // namespace tessera::formats::native
