#include "formats/torch_zip/mesh_region.h"

#include <algorithm>

#include "base/checked_math.h"

namespace tessera::formats::torch_zip {
namespace {

constexpr std::int64_t kMaxRanks = std::int64_t{1} << 31;

/// A cut of a tensor along one axis of the mesh: of which dimension, into how many parts.
struct Cut {
  std::size_t dim;
  std::int64_t num_parts;
  std::int64_t part;
  std::optional<std::int64_t> split_factor;  // of _StridedShard
};

/// Returns into how many parts the later axes of the mesh cut the same dimension.
std::int64_t num_parts_after(const std::vector<Cut>& cuts, std::size_t index) {
  std::int64_t num_parts = 1;
  for (std::size_t i = index + 1; i < cuts.size(); ++i) {
    if (cuts[i].dim == cuts[index].dim) num_parts *= cuts[i].num_parts;
  }
  return num_parts;
}

/// Reduces `box` to one part of a cut, as torch.chunk cuts: the size of a part is rounded up, so
/// the last parts can be smaller or empty.
void cut(Box& box, const Cut& by) {
  std::int64_t& offset = box.offsets[by.dim];
  std::int64_t& size = box.sizes[by.dim];
  const std::int64_t part_size = size / by.num_parts + (size % by.num_parts != 0 ? 1 : 0);
  const std::int64_t begin =
      part_size != 0 && by.part > size / part_size ? size : std::min(by.part * part_size, size);
  offset += begin;
  size = std::min(part_size, size - begin);
}

}  // namespace

std::string placement_to_string(const AxisPlacement& placement) {
  const std::string dim = std::to_string(placement.dim);
  switch (placement.kind) {
    case AxisPlacement::Kind::replicate:
      return "Replicate";
    case AxisPlacement::Kind::shard:
      return "Shard(" + dim + ")";
    case AxisPlacement::Kind::strided_shard:
      return "_StridedShard(" + dim + ", " + std::to_string(placement.split_factor) + ")";
  }
  return {};
}

MeshRegion region_in_mesh(std::span<const std::int64_t> whole_shape,
                          std::span<const std::int64_t> mesh,
                          std::span<const std::int64_t> coordinates,
                          std::span<const AxisPlacement> placements) {
  MeshRegion found{whole_box(whole_shape), {}};
  const auto num_ranks = checked_numel(mesh);
  if (!num_ranks || *num_ranks > kMaxRanks) return {{}, "a mesh of more than 2^31 ranks"};
  std::vector<Cut> cuts;  // in the order of the mesh's axes
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    if (coordinates[i] >= mesh[i]) return {{}, "coordinates outside of the mesh"};
    const AxisPlacement& placement = placements[i];
    if (placement.kind == AxisPlacement::Kind::replicate) continue;
    const bool is_strided = placement.kind == AxisPlacement::Kind::strided_shard;
    if (placement.dim < 0 || static_cast<std::uint64_t>(placement.dim) >= whole_shape.size()) {
      return {{},
              std::string("a tensor placed ") + (is_strided ? "_StridedShard" : "Shard") +
                  " along a dimension that it does not have"};
    }
    Cut made{static_cast<std::size_t>(placement.dim), mesh[i], coordinates[i], std::nullopt};
    if (is_strided) {
      made.split_factor = placement.split_factor;
      const auto is_such = [&](const Cut& cut) { return cut.dim == made.dim && cut.split_factor; };
      if (std::ranges::any_of(cuts, is_such)) return {{}, "two _StridedShard of one dimension"};
    }
    cuts.push_back(made);
  }
  for (const Cut& made : cuts) {
    if (!made.split_factor) cut(found.region, made);
  }
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    if (!cuts[i].split_factor) continue;
    if (*cuts[i].split_factor != num_parts_after(cuts, i)) {
      return {{},
              "a _StridedShard whose split_factor is not the number of parts that the later mesh "
              "dimensions make"};
    }
    cut(found.region, cuts[i]);
  }
  return found;
}

}  // namespace tessera::formats::torch_zip
