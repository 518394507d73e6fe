#include "formats/native/piece_places.h"

#include <algorithm>

namespace tessera::formats::native {

PiecePlaces::PiecePlaces(const Index& index)
    : index_(index),
      number_on_rank_(static_cast<std::size_t>(index.contents->world_size), 0),
      packed_on_rank_(number_on_rank_.size()) {}

std::vector<std::uint64_t> PiecePlaces::next_tensor() {
  const std::size_t t = next_++;
  const TensorEntry& tensor = index_.contents->tensors[t];
  std::vector<std::uint64_t> places;
  places.reserve(tensor.pieces.size());
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const Piece& piece = tensor.pieces[p];
    const StoredPiece stored = index_.stored({t, p});
    const auto rank = static_cast<std::size_t>(piece.rank);
    const DType dtype = tensor.meta.dtype;
    if (stored.file != 0) {
      places.push_back(index_.linked_place({t, p}));
    } else if (is_packed(index_.format_version, nbytes_of(piece.region, dtype))) {
      places.push_back(
          static_cast<std::uint64_t>(packed_on_rank_[rank].add(dtype, numel_of(piece.region))));
    } else {
      places.push_back(number_on_rank_[rank]);
    }
  }
  count(tensor);
  return places;
}

/// Adds 1 to `number_on_rank_` of each rank whose file lists the tensor.
void PiecePlaces::count(const TensorEntry& tensor) {
  if (tensor.pieces.empty()) {
    for (std::size_t& number : number_on_rank_) ++number;
    return;
  }
  holders_.clear();
  for (const Piece& piece : tensor.pieces) {
    holders_.push_back(static_cast<std::size_t>(piece.rank));
  }
  std::ranges::sort(holders_);
  const auto repeated = std::ranges::unique(holders_);
  holders_.erase(repeated.begin(), repeated.end());
  for (const std::size_t rank : holders_) ++number_on_rank_[rank];
}

}  // namespace tessera::formats::native
