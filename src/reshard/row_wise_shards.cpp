#include "reshard/row_wise_shards.h"

#include <algorithm>
#include <map>

#include "tessera/base/error.h"

namespace tessera::reshard {

std::vector<Shard> row_wise_shards(std::span<const Shard> parameter_shards,
                                   std::span<const std::int64_t> parameter_shape,
                                   std::span<const std::int64_t> state_shape) {
  TESSERA_CHECK(!parameter_shape.empty() && !state_shape.empty());
  const std::int64_t rows = parameter_shape[0];
  if (numel_of(state_shape) == 0 || numel_of(parameter_shape) == 0) {
    return {{whole_box(state_shape),
             parameter_shards.empty() ? std::vector<int>{0} : parameter_shards[0].ranks}};
  }
  const std::int64_t row_numel = numel_of(parameter_shape) / rows;
  std::vector<Shard> shards;
  for (const Shard& shard : parameter_shards) {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    if (const auto* box = std::get_if<Box>(&shard.region)) {
      const bool holds_row_begins = std::all_of(box->offsets.begin() + 1, box->offsets.end(),
                                                [](std::int64_t offset) { return offset == 0; });
      if (!holds_row_begins) continue;
      begin = box->offsets[0];
      end = begin + box->sizes[0];
    } else {
      const auto& range = std::get<FlatRange>(shard.region);
      begin = (range.begin + row_numel - 1) / row_numel;
      end = (range.end + row_numel - 1) / row_numel;
    }
    if (begin == end) continue;
    Box box = whole_box(state_shape);
    box.offsets[0] = begin;
    box.sizes[0] = end - begin;
    shards.push_back({std::move(box), shard.ranks});
  }
  return shards;
}

std::vector<Shard> shards_of_row_blocks(std::span<const Shard> parameter_shards,
                                        std::span<const std::int64_t> parameter_shape) {
  TESSERA_CHECK(parameter_shape.size() == 2);
  std::map<std::int64_t, std::int64_t> block_at;  // number of the block, by column offset
  for (const Shard& shard : parameter_shards) {
    const auto* box = std::get_if<Box>(&shard.region);
    TESSERA_CHECK(box != nullptr);
    block_at.emplace(box->offsets[1], 0);
  }
  std::int64_t num_blocks = 0;
  for (auto& [offset, block] : block_at) block = num_blocks++;
  std::vector<Shard> shards;
  for (const Shard& shard : parameter_shards) {
    const Box& box = std::get<Box>(shard.region);
    const std::int64_t first_row = block_at.at(box.offsets[1]) * parameter_shape[0];
    shards.push_back({Box{{first_row + box.offsets[0]}, {box.sizes[0]}}, shard.ranks});
  }
  return shards;
}

std::vector<std::int64_t> column_widths(std::span<const Region> regions,
                                        std::span<const std::int64_t> shape) {
  if (shape.size() != 2) return {1};
  std::map<std::int64_t, std::int64_t> width_at;  // number of columns, by column offset
  for (const Region& region : regions) {
    if (numel_of(region) == 0) continue;
    const auto* box = std::get_if<Box>(&region);
    if (box == nullptr) return {shape[1]};
    const auto [it, is_new] = width_at.emplace(box->offsets[1], box->sizes[1]);
    if (it->second != box->sizes[1]) return {shape[1]};
  }
  std::vector<std::int64_t> widths;
  std::int64_t end = 0;
  for (const auto& [offset, width] : width_at) {
    if (offset != end) return {shape[1]};
    end += width;
    widths.push_back(width);
  }
  if (widths.empty() || end != shape[1]) return {shape[1]};
  return widths;
}

}  // namespace tessera::reshard
