#include "formats/torch_zip/storage_blocks.h"

#include <algorithm>

#include "base/checked_math.h"
#include "base/digest.h"
#include "formats/pieces_with_elements.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_zip {

StorageBlocks::StorageBlocks(const CheckpointContents& contents)
    : contents_(contents), order_(pieces_with_elements(contents)) {
  for (const TensorEntry& tensor : contents.tensors) {
    auto& of_pieces = crcs_.emplace_back();
    for (const Piece& piece : tensor.pieces) {
      of_pieces.emplace_back(ceil_div(nbytes_of(piece.region, tensor.meta.dtype), kNbytes));
    }
  }
}

std::int64_t StorageBlocks::numel(PieceId piece) const {
  return static_cast<std::int64_t>(kNbytes /
                                   itemsize(contents_.tensors.at(piece.tensor_index).meta.dtype));
}

std::uint64_t StorageBlocks::nbytes(PieceId piece) const {
  const TensorEntry& tensor = contents_.tensors.at(piece.tensor_index);
  return nbytes_of(tensor.pieces.at(piece.piece_index).region, tensor.meta.dtype);
}

std::uint64_t StorageBlocks::nbytes(PieceId piece, std::int64_t begin) const {
  const DType dtype = contents_.tensors.at(piece.tensor_index).meta.dtype;
  return std::min(kNbytes, nbytes(piece) - static_cast<std::uint64_t>(begin) * itemsize(dtype));
}

std::uint64_t StorageBlocks::begin_byte(PieceId piece, std::int64_t begin,
                                        std::uint64_t block_nbytes) const {
  const DType dtype = contents_.tensors.at(piece.tensor_index).meta.dtype;
  const std::uint64_t begin_byte = static_cast<std::uint64_t>(begin) * itemsize(dtype);
  TESSERA_CHECK(begin_byte % kNbytes == 0 && begin_byte < nbytes(piece));
  TESSERA_CHECK(block_nbytes == std::min(kNbytes, nbytes(piece) - begin_byte));
  return begin_byte;
}

void StorageBlocks::set_crc(PieceId piece, std::uint64_t begin_byte, std::uint32_t crc) {
  crcs_[piece.tensor_index][piece.piece_index][begin_byte / kNbytes] = crc;
}

std::uint32_t StorageBlocks::crc_of(PieceId piece) const {
  std::uint64_t left = nbytes(piece);
  std::uint32_t crc = 0;
  for (const std::uint32_t block_crc : crcs_[piece.tensor_index][piece.piece_index]) {
    const std::uint64_t block_nbytes = std::min(kNbytes, left);
    crc = crc32_combine(crc, block_crc, block_nbytes);
    left -= block_nbytes;
  }
  return crc;
}

}  // namespace tessera::formats::torch_zip
