#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Divides pieces into blocks, and keeps the CRC of each written block. The bytes of each piece
/// become one storage of a torch.save file. Several threads may set the CRCs of different blocks at
/// the same time.
class StorageBlocks {
 public:
  using PieceId = CheckpointWriter::PieceId;
  static constexpr std::uint64_t kNbytes = std::uint64_t{4} << 20;  // of all blocks but the last

  /// Keeps a view of `contents`, which must outlive this.
  explicit StorageBlocks(const CheckpointContents& contents);

  /// Returns the pieces with elements, in the order of the tensors and of their pieces.
  std::span<const PieceId> write_order() const { return order_; }
  /// Returns the number of elements in each block of the piece; the last block may have fewer.
  std::int64_t numel(PieceId piece) const;
  /// Returns the number of bytes in the block that begins with element `begin`.
  std::uint64_t nbytes(PieceId piece, std::int64_t begin) const;
  /// Returns the number of bytes of the piece.
  std::uint64_t nbytes(PieceId piece) const;
  /// Returns the byte offset in its piece of the block from element `begin`. Checks `block_nbytes`.
  std::uint64_t begin_byte(PieceId piece, std::int64_t begin, std::uint64_t block_nbytes) const;

  void set_crc(PieceId piece, std::uint64_t begin_byte, std::uint32_t crc);
  /// Returns the CRC-32 of the piece's bytes. Requires: all of its blocks have a CRC.
  std::uint32_t crc_of(PieceId piece) const;

 private:
  const CheckpointContents& contents_;
  std::vector<PieceId> order_;
  std::vector<std::vector<std::vector<std::uint32_t>>> crcs_;  // indexed by tensor, piece and block
};

}  // namespace tessera::formats::torch_zip
