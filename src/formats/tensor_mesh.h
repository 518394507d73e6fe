#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/shape.h"

namespace tessera::formats {

/// The mesh of ranks over which a trainer placed a tensor, and the placements.
struct TensorMesh {
  std::vector<std::string> axes;        // names; empty if the mesh has none
  Shape sizes;                          // of the axes
  std::vector<std::string> placements;  // indexed by axis, as PyTorch writes them: `Shard(0)`
  /// Each rank, and where it is in the mesh: a coordinate on each axis. Sorted by rank.
  std::vector<std::pair<int, Shape>> coordinates;

  friend bool operator==(const TensorMesh&, const TensorMesh&) = default;
};

/// Interface of a CheckpointReader whose files say over which mesh a tensor was placed. Use
/// dynamic_cast to find out whether a reader implements it. Thread-safe.
class MeshSource {
 public:
  virtual ~MeshSource() = default;
  /// Returns the mesh of a tensor of the reader's contents; nothing if the files do not say it.
  virtual std::optional<TensorMesh> mesh_of(std::size_t tensor_index) const = 0;
};

}  // namespace tessera::formats
