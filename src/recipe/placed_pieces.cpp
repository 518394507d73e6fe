#include "recipe/placed_pieces.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace tessera::recipe {
namespace {

using formats::Piece;
using formats::TensorEntry;

/// Returns the rank that holds all source elements of a tensor, 0 if it has none; nothing if they
/// are on several ranks.
std::optional<int> only_rank(const BlockTensor& tensor, const formats::CheckpointContents& source) {
  std::optional<int> rank;
  for (const Block& block : tensor.blocks) {
    if (block.source == kConstant) continue;
    const std::vector<Piece>& pieces = source.tensors[block.source].pieces;
    const bool is_whole = !pieces.empty() && numel_of(pieces.front().region) ==
                                                 source.tensors[block.source].meta.numel();
    for (const Piece& piece : pieces) {
      if (rank && *rank != piece.rank) return std::nullopt;
      rank = piece.rank;
      if (is_whole) break;  // all other pieces are replicas
    }
  }
  return rank.value_or(0);
}

/// A box of a source tensor that has the same elements as a block. `source_dim` is, for each
/// dimension of the block, the dimension of the source along which these elements are taken.
struct BoxOfSource {
  Box box;  // a box of the source tensor
  // By dimension of the block; without meaning if its size is 1.
  std::vector<std::size_t> source_dim;
};

/// Returns the box of the source tensor (of this shape) that has the same elements as the block;
/// nothing if these elements do not form a box there.
std::optional<BoxOfSource> box_of_source(const Block& block, const Shape& shape) {
  const Shape strides = row_major_strides(shape);
  BoxOfSource result{{Shape(shape.size()), Shape(shape.size(), 1)},
                     std::vector<std::size_t>(block.box.sizes.size())};
  std::int64_t rest = block.offset;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    result.box.offsets[d] = rest / strides[d];
    rest %= strides[d];
  }
  std::vector<bool> is_taken(shape.size());
  for (std::size_t i = 0; i < block.box.sizes.size(); ++i) {
    if (block.box.sizes[i] == 1) continue;
    std::optional<std::size_t> dim;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] > 1 && strides[d] == block.strides[i]) dim = d;
    }
    if (!dim || is_taken[*dim] || result.box.offsets[*dim] + block.box.sizes[i] > shape[*dim]) {
      return std::nullopt;
    }
    is_taken[*dim] = true;
    result.source_dim[i] = *dim;
    result.box.sizes[*dim] = block.box.sizes[i];
  }
  return result;
}

/// Returns the part `box` of a block as a piece for `rank`. The coordinates of its elements begin
/// at the corner of the part.
PlacedPiece piece_of(const BlockTensor& tensor, const Block& block, Box box, int rank) {
  Block part = block;
  for (std::size_t d = 0; d < box.sizes.size(); ++d) {
    part.offset += (box.offsets[d] - block.box.offsets[d]) * block.strides[d];
  }
  part.box = whole_box(box.sizes);
  PlacedPiece placed{{box, rank}, {tensor.dtype, box.sizes, {}}};
  placed.tensor.blocks.push_back(std::move(part));
  return placed;
}

void place_block(const BlockTensor& tensor, const Block& block, const TensorEntry& source,
                 std::vector<PlacedPiece>& placed) {
  const auto of_source = box_of_source(block, source.meta.shape);
  std::set<Region> seen;
  std::int64_t num_placed = 0;
  std::vector<PlacedPiece> parts;
  for (const Piece& piece : source.pieces) {
    const auto* held = std::get_if<Box>(&piece.region);
    if (!of_source || held == nullptr || !seen.insert(piece.region).second) continue;
    const auto common = intersect(of_source->box, *held);
    if (!common) continue;
    Box box = block.box;
    for (std::size_t i = 0; i < box.sizes.size(); ++i) {
      if (box.sizes[i] == 1) continue;
      const std::size_t d = of_source->source_dim[i];
      box.offsets[i] += common->offsets[d] - of_source->box.offsets[d];
      box.sizes[i] = common->sizes[d];
    }
    num_placed += box.numel();
    parts.push_back(piece_of(tensor, block, std::move(box), piece.rank));
  }
  if (num_placed == block.box.numel()) {
    std::ranges::move(parts, std::back_inserter(placed));
    return;
  }
  placed.push_back(
      piece_of(tensor, block, block.box, source.pieces.empty() ? 0 : source.pieces.front().rank));
}

}  // namespace

std::vector<PlacedPiece> place_pieces(BlockTensor tensor,
                                      const formats::CheckpointContents& source) {
  std::vector<PlacedPiece> placed;
  if (const auto rank = only_rank(tensor, source)) {
    placed.push_back({{whole_box(tensor.shape), *rank}, std::move(tensor)});
    return placed;
  }
  for (const Block& block : tensor.blocks) {
    if (block.source == kConstant) {
      placed.push_back(piece_of(tensor, block, block.box, 0));
    } else {
      place_block(tensor, block, source.tensors[block.source], placed);
    }
  }
  std::ranges::sort(placed, {}, [](const PlacedPiece& each) { return each.piece.region; });
  return placed;
}

}  // namespace tessera::recipe
