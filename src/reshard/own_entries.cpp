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

/// Whether each rank has a piece that is the whole tensor. A tensor without elements needs no
/// bytes.
bool is_whole_everywhere(const TensorEntry& tensor, int world_size) {
  if (tensor.meta.numel() == 0) return true;
  std::set<int> ranks;
  for (const Piece& piece : tensor.pieces) {
    if (numel_of(piece.region) == tensor.meta.numel()) ranks.insert(piece.rank);
  }
  return ranks.size() == static_cast<std::size_t>(world_size) &&
         tensor.pieces.size() == ranks.size();
}

/// Gives all ranks the whole tensor.
void spread(TensorEntry& tensor, TensorCopy& copy, int world_size) {
  std::vector<std::uint32_t> sources;  // that hold the whole tensor
  for (const auto& each : copy.source_pieces) {
    sources.insert(sources.end(), each.begin(), each.end());
  }
  std::ranges::sort(sources);
  const auto repeated = std::ranges::unique(sources);
  sources.erase(repeated.begin(), repeated.end());
  tensor.pieces.clear();
  for (int rank = 0; rank < world_size; ++rank) {
    tensor.pieces.push_back({whole_box(tensor.meta.shape), rank});
  }
  copy.source_pieces.assign(tensor.pieces.size(), sources);
}

std::uint64_t nbytes_of_pieces(const TensorEntry& tensor) {
  std::uint64_t nbytes = 0;
  for (const Piece& piece : tensor.pieces) nbytes += nbytes_of(piece.region, tensor.meta.dtype);
  return nbytes;
}

/// Removes the pieces of the ranks for which `is_removed` is true.
template <class IsRemoved>
void remove_pieces(TensorEntry& tensor, TensorCopy& copy, const IsRemoved& is_removed) {
  std::vector<Piece> pieces;
  std::vector<std::vector<std::uint32_t>> sources;
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    if (is_removed(tensor.pieces[p].rank)) continue;
    pieces.push_back(tensor.pieces[p]);
    sources.push_back(std::move(copy.source_pieces[p]));
  }
  tensor.pieces = std::move(pieces);
  copy.source_pieces = std::move(sources);
}

}  // namespace

void place_own_entries(Plan& plan) {
  std::vector<TensorEntry>& tensors = plan.destination.tensors;
  const int world_size = plan.destination.world_size;
  std::set<std::size_t> placed;  // shared entries that all ranks had
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto own = formats::parse_per_rank_name(tensors[i].meta.fqn);
    if (!own || own->rank >= world_size) continue;
    const TensorEntry* const shared = plan.destination.find_tensor(own->name);
    if (shared == nullptr) continue;
    const auto s = static_cast<std::size_t>(shared - tensors.data());
    for (const std::size_t t : {s, i}) {
      plan.nbytes_to_write -= nbytes_of_pieces(tensors[t]);
      const bool is_new = t == i || placed.insert(s).second;
      if (is_new && !is_whole_everywhere(tensors[t], world_size)) {
        spread(tensors[t], plan.copies[t], world_size);
      }
    }
    const auto is_own = [&](int rank) { return rank == own->rank; };
    remove_pieces(tensors[s], plan.copies[s], is_own);
    remove_pieces(tensors[i], plan.copies[i], [&](int rank) { return !is_own(rank); });
    plan.nbytes_to_write += nbytes_of_pieces(tensors[s]) + nbytes_of_pieces(tensors[i]);
  }
}

std::vector<std::string> find_separate_own_entries(const formats::CheckpointContents& contents) {
  std::vector<std::string> names;
  const auto check = [&](const std::string& name, const auto& has) {
    const auto own = formats::parse_per_rank_name(name);
    if (own && (own->rank >= contents.world_size || !has(own->name))) names.push_back(name);
  };
  for (const TensorEntry& tensor : contents.tensors) {
    check(tensor.meta.fqn,
          [&](const std::string& name) { return contents.find_tensor(name) != nullptr; });
  }
  for (const formats::ValueEntry& value : contents.values) {
    check(value.name, [&](const std::string& name) {
      return std::ranges::binary_search(contents.values, name, {}, &formats::ValueEntry::name);
    });
  }
  return names;
}

}  // namespace tessera::reshard
