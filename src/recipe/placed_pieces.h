#pragma once

#include <vector>

#include "recipe/block_tensor.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// A piece of a tensor that a recipe makes, with its elements. The elements' own tensor is the
/// piece's box: coordinates count from its corner.
struct PlacedPiece {
  formats::Piece piece;
  BlockTensor tensor;
};

/// Returns pieces that cover a tensor. A tensor whose elements all lie with one rank has one piece.
/// Else each block has one for each source piece that is a box of it, with that piece's rank, so
/// that a move without a new layout leaves elements with their ranks.
std::vector<PlacedPiece> place_pieces(BlockTensor tensor,
                                      const formats::CheckpointContents& source);

}  // namespace tessera::recipe
