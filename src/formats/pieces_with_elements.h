#pragma once

#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns the pieces of `contents` that have elements, tensor by tensor: the order in which a
/// writer without an order of its own takes them.
inline std::vector<CheckpointWriter::PieceId> pieces_with_elements(
    const CheckpointContents& contents) {
  std::vector<CheckpointWriter::PieceId> pieces;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    for (std::size_t p = 0; p < contents.tensors[t].pieces.size(); ++p) {
      if (numel_of(contents.tensors[t].pieces[p].region) > 0) pieces.push_back({t, p});
    }
  }
  return pieces;
}

}  // namespace tessera::formats
