#pragma once

#include <vector>

#include "recipe/block_tensor.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// A piece of a tensor that a recipe makes, with its elements. `tensor` has the piece's elements
/// alone; its coordinates count from the corner of the piece's box.
struct PlacedPiece {
  formats::Piece piece;
  BlockTensor tensor;
};

/// Returns pieces that cover a tensor. If one rank holds all elements, there is one piece.
/// Otherwise each block is cut as the source tensor is cut into boxes, and each part keeps its
/// rank. A block for which this is impossible becomes one piece, on the rank of the source tensor's
/// first piece. So usually a move without a new layout leaves elements on their ranks.
std::vector<PlacedPiece> place_pieces(BlockTensor tensor,
                                      const formats::CheckpointContents& source);

}  // namespace tessera::recipe
