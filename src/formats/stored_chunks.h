#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/byte_buffer.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::formats {

// [Note: Stored chunks] A move from native to native can give compressed chunks of the source to
// the new checkpoint as they are, without decoding and encoding them. A chunk of a new piece has
// the elements of one chunk of the source if the pieces' chunks are of one size and begin at the
// same elements. An executor asks for such chunks by these two interfaces. A source or a writer
// that does not implement them moves elements.

/// A compressed chunk of a piece in its stored form. A view of the memory that it was read into.
struct StoredChunk {
  std::span<const std::byte> bytes{};
  std::uint64_t checksum = 0;  // XXH3-64 of `bytes`
  bool is_raw = false;         // stored without compression, because that is smaller
};

/// A source that can give compressed chunks in their stored form. Thread-safe.
class ChunkSource {
 public:
  virtual ~ChunkSource() = default;

  /// Reads the chunk with exactly the elements `range` of a piece, into `room`, and checks its
  /// checksum. Returns nothing, and reads no element, unless the piece is stored in chunks of
  /// `chunk_numel` elements and `range` is one of them (the last chunk may have fewer elements).
  /// Throws: Error(corruption) with file, tensor and byte range; Error(io).
  virtual std::optional<StoredChunk> read_chunk(std::size_t tensor_index, std::size_t piece_index,
                                                FlatRange range, std::int64_t chunk_numel,
                                                tessera::detail::ByteBuffer& room) const = 0;
};

/// A writer that can take compressed chunks in their stored form. As thread-safe as
/// CheckpointWriter.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;

  /// Returns whether `write_chunk` may take chunks of a piece. If not, do not call it for that.
  virtual bool takes_chunks(CheckpointWriter::PieceId piece) const = 0;

  /// Takes one block as `write_block` does, in its stored form: a chunk of `block_numel` elements
  /// with the dtype of the piece. Returns false if this writer stores the block in another form.
  /// The caller must then pass the elements to `write_block`.
  virtual bool write_chunk(CheckpointWriter::PieceId piece, std::int64_t begin,
                           const StoredChunk& chunk) = 0;
};

}  // namespace tessera::formats
