#include "reshard/own_entries.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "formats/per_rank.h"

namespace tessera::reshard {
namespace {

using formats::Piece;
using formats::TensorEntry;

/// Returns whether all pieces are whole copies of the tensor, and `rank` has one of them.
bool is_whole_on(const TensorEntry& tensor, int rank) {
  const auto is_whole = [&](const Piece& piece) {
    return numel_of(piece.region) == tensor.meta.numel();
  };
  return std::ranges::all_of(tensor.pieces, is_whole) &&
         std::ranges::find(tensor.pieces, rank, &Piece::rank) != tensor.pieces.end();
}

/// Removes the pieces of the ranks for which `is_removed` is true. Returns the bytes of the removed
/// pieces.
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
    sources.push_back(copy.source_pieces[p]);
  }
  tensor.pieces = std::move(pieces);
  copy.source_pieces = std::move(sources);
  return nbytes;
}

}  // namespace

void place_own_entries(Plan& plan) {
  std::vector<TensorEntry>& tensors = plan.destination.tensors;
  const std::set<std::string> apart = formats::find_own_entries_apart(plan.destination);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto own = formats::parse_per_rank_name(tensors[i].meta.fqn);
    const bool is_apart = apart.contains(tensors[i].meta.fqn);
    if (!own || is_apart || own->rank >= plan.destination.world_size) continue;
    const TensorEntry* const shared = plan.destination.find_tensor(own->name);
    if (shared == nullptr || !is_whole_on(*shared, own->rank) ||
        !is_whole_on(tensors[i], own->rank) || shared->pieces.size() < 2) {
      continue;  // else one of the two tensors would have no piece left
    }
    const auto s = static_cast<std::size_t>(shared - tensors.data());
    const auto is_own = [&](int rank) { return rank == own->rank; };
    plan.nbytes_to_write -= remove_pieces(tensors[s], plan.copies[s], is_own);
    plan.nbytes_to_write -=
        remove_pieces(tensors[i], plan.copies[i], [&](int rank) { return !is_own(rank); });
  }
}

std::vector<std::string> find_separate_own_entries(const formats::CheckpointContents& contents) {
  const std::set<std::string> apart = formats::find_own_entries_apart(contents);
  std::vector<std::string> names;
  const auto check = [&](const std::string& name, const auto& pieces) {
    const auto own = formats::parse_per_rank_name(name);
    if (!own) return;
    const auto is_elsewhere = [&](const Piece& piece) { return piece.rank != own->rank; };
    if (own->rank >= contents.world_size || apart.contains(name) ||
        std::ranges::any_of(pieces, is_elsewhere)) {
      names.push_back(name);
    }
  };
  for (const TensorEntry& tensor : contents.tensors) check(tensor.meta.fqn, tensor.pieces);
  for (const formats::ValueEntry& value : contents.values) {
    check(value.name, std::vector<Piece>());
  }
  return names;
}

}  // namespace tessera::reshard
