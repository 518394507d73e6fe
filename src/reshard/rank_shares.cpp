#include "tessera/reshard/planner.h"

namespace tessera::reshard {

std::vector<RankShare> rank_shares(const Plan& plan) {
  std::vector<RankShare> shares(static_cast<std::size_t>(plan.destination.world_size));
  for (const formats::TensorEntry& tensor : plan.destination.tensors) {
    for (const formats::Piece& piece : tensor.pieces) {
      RankShare& share = shares[static_cast<std::size_t>(piece.rank)];
      ++share.num_pieces;
      share.nbytes += nbytes_of(piece.region, tensor.meta.dtype);
    }
  }
  return shares;
}

}  // namespace tessera::reshard
