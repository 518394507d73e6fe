#pragma once

#include <vector>

#include "recipe/block_tensor.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// A piece of a tensor that a recipe makes, with its rank. `tensor` has only the piece's elements;
/// its coordinates begin at the corner of the piece's box.
struct PlacedPiece {
  formats::Piece piece;
  BlockTensor tensor;
};

/// Cuts a tensor into pieces so that a move without a new layout leaves most elements on their
/// ranks. If one rank holds all elements, returns one piece. Otherwise cuts each block where its
/// source tensor is cut; each cut gets the rank of its source piece. A block that cannot be cut so
/// is one piece, on the rank of the source's first piece (a constant: rank 0).
std::vector<PlacedPiece> place_pieces(BlockTensor tensor,
                                      const formats::CheckpointContents& source);

}  // namespace tessera::recipe
