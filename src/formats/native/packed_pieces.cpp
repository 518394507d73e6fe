#include "formats/native/packed_pieces.h"

#include "tessera/layout/region.h"

namespace tessera::formats::native {

std::uint32_t format_version_for(const CheckpointContents& contents) {
  std::int64_t num_small = 0;
  for (const TensorEntry& tensor : contents.tensors) {
    for (const Piece& piece : tensor.pieces) {
      const bool is_small = is_packed(kPackedVersion, nbytes_of(piece.region, tensor.meta.dtype));
      if (is_small && ++num_small == kMinPackedPieces) return kPackedVersion;
    }
  }
  return kFirstVersion;
}

std::string packed_dataset_name(DType dtype) {
  return "packed_" + std::string(dtype_name(dtype));
}

}  // namespace tessera::formats::native
