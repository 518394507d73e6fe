#include "formats/torch_zip/storage_blocks.h"

#include <algorithm>

#include "base/checked_math.h"
#include "base/digest.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_zip {

StorageBlocks::StorageBlocks(const CheckpointContents& contents) : contents_(contents) {
  for (const TensorEntry& tensor : contents.tensors) {
    crcs_.emplace_back(ceil_div(tensor.meta.nbytes(), kNbytes));
  }
}

std::vector<CheckpointWriter::PieceId> StorageBlocks::write_order() const {
  std::vector<PieceId> order;
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
    if (contents_.tensors[i].meta.nbytes() > 0) order.push_back({i, 0});
  }
  return order;
}

std::int64_t StorageBlocks::numel(PieceId piece) const {
  return static_cast<std::int64_t>(kNbytes /
                                   itemsize(contents_.tensors.at(piece.tensor_index).meta.dtype));
}

std::uint64_t StorageBlocks::nbytes(PieceId piece, std::int64_t begin) const {
  const TensorMeta& meta = contents_.tensors.at(piece.tensor_index).meta;
  return std::min(kNbytes,
                  meta.nbytes() - static_cast<std::uint64_t>(begin) * itemsize(meta.dtype));
}

std::uint64_t StorageBlocks::begin_byte(PieceId piece, std::int64_t begin,
                                        std::uint64_t nbytes) const {
  const TensorMeta& meta = contents_.tensors.at(piece.tensor_index).meta;
  const std::uint64_t begin_byte = static_cast<std::uint64_t>(begin) * itemsize(meta.dtype);
  TESSERA_CHECK(piece.piece_index == 0 && begin_byte % kNbytes == 0);
  TESSERA_CHECK(begin_byte < meta.nbytes() &&
                nbytes == std::min(kNbytes, meta.nbytes() - begin_byte));
  return begin_byte;
}

void StorageBlocks::set_crc(std::size_t tensor, std::uint64_t begin_byte, std::uint32_t crc) {
  crcs_[tensor][begin_byte / kNbytes] = crc;
}

std::uint32_t StorageBlocks::crc_of(std::size_t tensor) const {
  std::uint64_t left = contents_.tensors[tensor].meta.nbytes();
  std::uint32_t crc = 0;
  for (const std::uint32_t block_crc : crcs_[tensor]) {
    const std::uint64_t block_nbytes = std::min(kNbytes, left);
    crc = crc32_combine(crc, block_crc, block_nbytes);
    left -= block_nbytes;
  }
  return crc;
}

}  // namespace tessera::formats::torch_zip
