#include "reshard/own_entries.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "formats/per_rank.h"

namespace tessera::reshard {
namespace {

using formats::Piece;
using formats::TensorEntry;

bool is_on_all_ranks(const TensorEntry& tensor) {
  return std::ranges::all_of(tensor.pieces, [&](const Piece& piece) {
    return numel_of(piece.region) == tensor.meta.numel();
  });
}

/// Removes the pieces of the ranks for which `is_removed` is true. Returns their bytes.
template <class IsRemoved>
std::uint64_t remove_pieces(TensorEntry& tensor, TensorCopy& copy, const IsRemoved& is_removed) {
  std::vector<Piece> pieces;
  std::vector<std::vector<std::uint32_t>> sources;
  std::uint64_t nbytes = 0;
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    if (is_removed(tensor.pieces[p].rank)) {
      nbytes += nbytes_of(tensor.pieces[p].region, tensor.meta.dtype);
      continue;
    }
    pieces.push_back(tensor.pieces[p]);
    sources.push_back(std::move(copy.source_pieces[p]));
  }
  tensor.pieces = std::move(pieces);
  copy.source_pieces = std::move(sources);
  return nbytes;
}

}  // namespace

void place_own_entries(Plan& plan) {
  std::vector<TensorEntry>& tensors = plan.destination.tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto own = formats::parse_per_rank_name(tensors[i].meta.fqn);
    if (!own || own->rank >= plan.destination.world_size) continue;
    const TensorEntry* const shared = plan.destination.find_tensor(own->name);
    if (shared == nullptr || !is_on_all_ranks(*shared) || !is_on_all_ranks(tensors[i])) continue;
    const auto s = static_cast<std::size_t>(shared - tensors.data());
    const auto is_own = [&](int rank) { return rank == own->rank; };
    plan.nbytes_to_write -= remove_pieces(tensors[s], plan.copies[s], is_own);
    plan.nbytes_to_write -=
        remove_pieces(tensors[i], plan.copies[i], [&](int rank) { return !is_own(rank); });
  }
}

}  // namespace tessera::reshard
