#include "reshard/piece_index.h"

#include <algorithm>

namespace tessera::reshard {
namespace {

bool share_elements(const std::vector<Box>& a, const std::vector<Box>& b) {
  return std::any_of(a.begin(), a.end(), [&](const Box& box) {
    return std::any_of(b.begin(), b.end(),
                       [&](const Box& other) { return intersect(box, other).has_value(); });
  });
}

}  // namespace

PieceIndex::Group PieceIndex::describe(const Region& region, std::span<const std::int64_t> shape) {
  if (const auto range = as_flat_range(region, shape)) return {*range, true, {}, {}};
  Group group{{}, false, boxes_of(region, shape), {}};
  const Shape strides = row_major_strides(shape);
  const auto offset_of = [&](const Box& box, bool of_last) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      offset += (box.offsets[d] + (of_last ? box.sizes[d] - 1 : 0)) * strides[d];
    }
    return offset;
  };
  group.bounds = {offset_of(group.boxes.front(), false), offset_of(group.boxes.back(), true) + 1};
  return group;
}

PieceIndex::PieceIndex(const formats::TensorEntry& tensor) : tensor_(tensor) {
  std::map<Region, std::size_t> place;
  for (std::uint32_t i = 0; i < tensor.pieces.size(); ++i) {
    const Region& region = tensor.pieces[i].region;
    if (numel_of(region) == 0) continue;
    const auto [it, is_new] = place.emplace(region, groups_.size());
    if (is_new) groups_.push_back(describe(region, tensor.meta.shape));
    groups_[it->second].pieces.push_back(i);
  }
  std::sort(groups_.begin(), groups_.end(),
            [](const Group& a, const Group& b) { return a.bounds < b.bounds; });
  for (const Group& group : groups_) {
    longest_bounds_ = std::max(longest_bounds_, group.bounds.numel());
  }
}

std::uint32_t PieceIndex::choose(const Group& group, int rank) const {
  for (const std::uint32_t piece : group.pieces) {
    if (tensor_.pieces[piece].rank == rank) return piece;
  }
  return group.pieces[static_cast<std::size_t>(rank) % group.pieces.size()];
}

std::vector<std::uint32_t> PieceIndex::pieces_sharing(const Region& region, int rank) const {
  std::vector<std::uint32_t> pieces;
  if (numel_of(region) == 0) return pieces;
  const Group wanted = describe(region, tensor_.meta.shape);
  auto group = std::lower_bound(
      groups_.begin(), groups_.end(), wanted.bounds.begin - longest_bounds_,
      [](const Group& entry, std::int64_t begin) { return entry.bounds.begin < begin; });
  for (; group != groups_.end() && group->bounds.begin < wanted.bounds.end; ++group) {
    if (group->bounds.end <= wanted.bounds.begin) continue;
    if (!(group->is_range && wanted.is_range)) {
      const auto boxes = [&](const Group& g) {
        return g.is_range ? boxes_of(g.bounds, tensor_.meta.shape) : g.boxes;
      };
      if (!share_elements(boxes(*group), boxes(wanted))) continue;
    }
    pieces.push_back(choose(*group, rank));
  }
  std::sort(pieces.begin(), pieces.end());
  return pieces;
}

std::vector<Region> regions_of(const formats::TensorEntry& tensor) {
  std::vector<Region> regions;
  regions.reserve(tensor.pieces.size());
  for (const formats::Piece& piece : tensor.pieces) regions.push_back(piece.region);
  return regions;
}

Region region_in_source(const TensorCopy& copy, const Region& destination,
                        std::span<const std::int64_t> destination_shape) {
  if (copy.num_repeated_rows == 0) return destination;
  const auto rows = as_flat_range(destination, destination_shape);
  TESSERA_CHECK(rows.has_value());  // row-wise state is cut by rows
  const std::int64_t begin = rows->begin % copy.num_repeated_rows;
  TESSERA_CHECK(begin + rows->numel() <= copy.num_repeated_rows);
  return FlatRange{begin, begin + rows->numel()};
}

void find_sources(const formats::TensorEntry& source, const formats::TensorEntry& destination,
                  TensorCopy& copy) {
  if (destination.pieces.empty()) return;
  const PieceIndex index(source);
  if (!copy.merged_widths.empty()) {
    const auto all = index.pieces_sharing(whole_box(source.meta.shape), 0);
    copy.source_pieces.edit().assign(destination.pieces.size(), all);
    return;
  }
  for (const formats::Piece& piece : destination.pieces) {
    const Region region = region_in_source(copy, piece.region, destination.meta.shape);
    copy.source_pieces.push_back(index.pieces_sharing(region, piece.rank));
  }
}

}  // namespace tessera::reshard
