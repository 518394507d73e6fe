#include "inspect/layout_map.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

namespace tessera::inspect {
namespace {

// Returns the only dimension along which a box is smaller than the tensor; the number of dimensions
// if there is no such dimension or more than one.
std::size_t cut_dimension(const Box& box, const Shape& shape) {
  std::size_t dim = shape.size();
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (box.sizes[d] == shape[d]) continue;
    if (dim != shape.size()) return shape.size();
    dim = d;
  }
  return dim;
}

/// Returns whether the pieces of a 2-d tensor are the boxes of a grid of row cuts and column cuts.
/// Requires: the pieces cover every element once.
bool is_grid(const formats::TensorEntry& tensor) {
  std::set<std::int64_t> row_cuts;
  std::set<std::int64_t> column_cuts;
  std::set<Shape> corners;
  for (const formats::Piece& piece : tensor.pieces) {
    const auto* box = std::get_if<Box>(&piece.region);
    if (box == nullptr) return false;
    if (box->numel() == 0) continue;
    row_cuts.insert(box->offsets[0]);
    column_cuts.insert(box->offsets[1]);
    corners.insert(box->offsets);
  }
  return corners.size() == row_cuts.size() * column_cuts.size();
}

}  // namespace

LayoutPattern layout_pattern(const formats::TensorEntry& tensor) {
  using Cut = LayoutPattern::Cut;
  const Shape& shape = tensor.meta.shape;
  LayoutPattern pattern;
  if (tensor.meta.numel() == 0) return pattern;
  std::map<Region, std::int64_t> holders;
  for (const formats::Piece& piece : tensor.pieces) {
    if (numel_of(piece.region) > 0) ++holders[piece.region];
  }
  std::vector<Region> regions;
  for (const auto& [region, count] : holders) regions.push_back(region);
  pattern.num_shards = static_cast<std::int64_t>(regions.size());
  if (regions.empty() || !check_coverage(regions, shape).empty()) {
    pattern.cut = Cut::incomplete;
    return pattern;
  }
  pattern.num_replicas = holders.begin()->second;
  for (const auto& [region, count] : holders) {
    if (count != pattern.num_replicas) pattern.num_replicas = 0;
  }
  if (numel_of(regions.front()) == tensor.meta.numel()) {
    pattern.cut = Cut::whole;
    return pattern;
  }
  const auto* first = std::get_if<Box>(&regions.front());
  pattern.dim = first ? cut_dimension(*first, shape) : shape.size();
  const bool is_slabs = pattern.dim < shape.size() &&
                        std::all_of(regions.begin(), regions.end(), [&](const Region& region) {
                          const auto* box = std::get_if<Box>(&region);
                          return box != nullptr && cut_dimension(*box, shape) == pattern.dim;
                        });
  if (is_slabs) {
    pattern.cut = Cut::dimension;
    return pattern;
  }
  pattern.dim = 0;
  const bool are_ranges = std::all_of(regions.begin(), regions.end(), [&](const Region& region) {
    return as_flat_range(region, shape).has_value();
  });
  pattern.cut = are_ranges ? Cut::flat : Cut::boxes;
  return pattern;
}

std::string layout_pattern_to_string(const LayoutPattern& pattern) {
  std::string text;
  switch (pattern.cut) {
    case LayoutPattern::Cut::empty:
      return "empty";
    case LayoutPattern::Cut::incomplete:
      return "incomplete";
    case LayoutPattern::Cut::whole:
      text = "whole";
      break;
    case LayoutPattern::Cut::dimension:
      text = "dim " + std::to_string(pattern.dim);
      break;
    case LayoutPattern::Cut::flat:
      text = "flat";
      break;
    case LayoutPattern::Cut::boxes:
      text = "boxes";
      break;
  }
  if (pattern.cut != LayoutPattern::Cut::whole) text += " / " + std::to_string(pattern.num_shards);
  if (pattern.num_replicas == 0) return text + " × ?";
  if (pattern.num_replicas > 1) text += " × " + std::to_string(pattern.num_replicas);
  return text;
}

std::optional<TableSharding> table_sharding(const formats::TensorEntry& tensor) {
  if (tensor.meta.shape.size() != 2 || !table_of_weight(tensor.meta.fqn)) return std::nullopt;
  const LayoutPattern pattern = layout_pattern(tensor);
  if (pattern.cut == LayoutPattern::Cut::whole && pattern.num_replicas > 1) {
    return TableSharding::data_parallel;
  }
  if (pattern.num_replicas != 1) return std::nullopt;
  if (pattern.cut == LayoutPattern::Cut::dimension) {
    return pattern.dim == 0 ? TableSharding::row_wise : TableSharding::column_wise;
  }
  // If a shard has only one row, its box is also a range in row-major order, so the cut may be
  // `flat`.
  const bool is_cut_both_ways =
      (pattern.cut == LayoutPattern::Cut::boxes || pattern.cut == LayoutPattern::Cut::flat) &&
      is_grid(tensor);
  return is_cut_both_ways ? std::optional(TableSharding::grid) : std::nullopt;
}

std::vector<std::int64_t> numel_by_rank(const formats::TensorEntry& tensor, int world_size) {
  std::vector<std::int64_t> numels(static_cast<std::size_t>(std::max(world_size, 0)));
  for (const formats::Piece& piece : tensor.pieces) {
    const auto rank = static_cast<std::size_t>(piece.rank);
    if (piece.rank >= 0 && rank < numels.size()) numels[rank] += numel_of(piece.region);
  }
  return numels;
}

std::size_t shares_per_character(std::size_t num_shares, std::size_t max_width) {
  return std::max<std::size_t>(1, (num_shares + max_width - 1) / max_width);
}

std::string draw_shares(std::span<const std::int64_t> shares, std::size_t max_width) {
  static constexpr std::array<const char*, 8> kLevels = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  if (shares.empty()) return {};
  const std::size_t num_in_group = shares_per_character(shares.size(), max_width);
  const std::int64_t largest = *std::max_element(shares.begin(), shares.end());
  std::string text;
  for (std::size_t begin = 0; begin < shares.size(); begin += num_in_group) {
    const auto group = shares.subspan(begin, std::min(num_in_group, shares.size() - begin));
    const std::int64_t share = *std::max_element(group.begin(), group.end());
    if (share == 0) {
      text += "·";
    } else {
      const double level = static_cast<double>(share) / static_cast<double>(largest) * 8;
      text += kLevels[static_cast<std::size_t>(std::clamp(level - 0.5, 0.0, 7.0))];
    }
  }
  return text;
}

}  // namespace tessera::inspect
