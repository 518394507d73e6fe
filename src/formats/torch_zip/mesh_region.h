#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/layout/region.h"

// Which part of a tensor one rank of a device mesh holds, as PyTorch's DTensor cuts it.
namespace tessera::formats::torch_zip {

/// What one axis of a mesh does to a tensor: it replicates the tensor, or cuts a dimension of it.
struct AxisPlacement {
  enum class Kind { replicate, shard, strided_shard };

  Kind kind = Kind::replicate;
  std::int64_t dim = 0;           // the dimension that is cut
  std::int64_t split_factor = 0;  // of _StridedShard

  friend bool operator==(const AxisPlacement&, const AxisPlacement&) = default;
  friend auto operator<=>(const AxisPlacement&, const AxisPlacement&) = default;
};

/// Returns a placement as PyTorch writes it: `Replicate`, `Shard(0)`, `_StridedShard(0, 2)`.
std::string placement_to_string(const AxisPlacement& placement);

/// The part of a tensor that one rank holds. If `problem` is not empty, it says why the part is not
/// known.
struct MeshRegion {
  Box region;
  std::string problem;
};

/// Returns the part of a tensor that the rank at `coordinates` holds. `Shard(d)` cuts dimension d
/// as torch.chunk does, one axis of the mesh after the other. `_StridedShard(d)` cuts d after the
/// later axes have cut it: with FSDP2 and tensor parallelism, FSDP2 cuts the part that tensor
/// parallelism gave to the rank. Source: torch/distributed/tensor (placement_types.py, _utils.py),
/// torch 2.4 to 2.15.
/// Requires: `mesh`, `coordinates` and `placements` have one item for each axis.
MeshRegion region_in_mesh(std::span<const std::int64_t> whole_shape,
                          std::span<const std::int64_t> mesh,
                          std::span<const std::int64_t> coordinates,
                          std::span<const AxisPlacement> placements);

}  // namespace tessera::formats::torch_zip
