#include "support/copy_checkpoint.h"

#include <algorithm>
#include <map>
#include <vector>

#include "support/memory_checkpoint.h"
#include "tessera/base/parallel.h"

namespace tessera::test {

void copy_checkpoint(const formats::CheckpointReader& source, formats::CheckpointWriter& writer,
                     int num_threads) {
  struct Block {
    formats::CheckpointWriter::PieceId piece;
    std::size_t bytes_index;
    FlatRange range;
  };
  std::vector<Bytes> piece_bytes;
  std::vector<Block> blocks;
  for (const auto piece : writer.write_order()) {
    const formats::TensorEntry& tensor = writer.contents().tensors.at(piece.tensor_index);
    const auto& tensors = source.contents().tensors;
    const auto index =
        static_cast<std::size_t>(source.contents().find_tensor(tensor.meta.fqn) - tensors.data());
    const Region& region = tensor.pieces.at(piece.piece_index).region;
    piece_bytes.push_back(gather_region(whole_tensor(source, index), tensor.meta.shape, region,
                                        itemsize(tensor.meta.dtype)));
    const std::int64_t block_numel = writer.block_numel(piece);
    for (std::int64_t begin = 0; begin < numel_of(region); begin += block_numel) {
      blocks.push_back({piece,
                        piece_bytes.size() - 1,
                        {begin, std::min(begin + block_numel, numel_of(region))}});
    }
  }
  try {
    parallel_for(static_cast<std::int64_t>(blocks.size()), num_threads, {}, [&](std::int64_t i) {
      const Block& block = blocks[static_cast<std::size_t>(i)];
      const std::uint64_t item_nbytes =
          itemsize(writer.contents().tensors[block.piece.tensor_index].meta.dtype);
      const auto bytes = std::span<const std::byte>(piece_bytes[block.bytes_index])
                             .subspan(static_cast<std::size_t>(block.range.begin) * item_nbytes,
                                      static_cast<std::size_t>(block.range.numel()) * item_nbytes);
      try {
        writer.write_block(block.piece, block.range.begin, bytes);
      } catch (...) {
        writer.abandon();  // other threads may wait for this block to be written
        throw;
      }
    });
  } catch (...) {
    writer.abandon();
    throw;
  }
  writer.commit();
}

}  // namespace tessera::test
