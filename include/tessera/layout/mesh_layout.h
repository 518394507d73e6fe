#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/layout/strategy.h"

namespace tessera {

/// What happens to a tensor along one axis of a mesh.
struct MeshPlacement {
  enum class Kind {
    replicate,  // each index of the axis has the same
    shard,      // dimension `number` is cut among the indices
    stage,      // only index `number` has the tensor, as in pipeline parallelism
  };
  Kind kind = Kind::replicate;
  int number = 0;
  friend bool operator==(const MeshPlacement&, const MeshPlacement&) = default;
};

/// A mesh of ranks, and rules that say how tensors are cut along its axes. The terms are those of
/// DeviceMesh and Placement in torch.distributed.tensor. Ranks are row-major: in a mesh of shape
/// (A, B), rank = a * B + b.
struct MeshLayout {
  struct Rule {
    std::string names;                      // a glob; see glob_match
    std::vector<MeshPlacement> placements;  // one for each axis of the mesh
  };
  std::vector<int> shape;
  std::vector<Rule> rules;  // for each name, the first that matches is used

  int world_size() const;

  /// Parses a file such as
  ///     {"schema": 1, "mesh": [2, 4], "rules": [
  ///       {"names": "*.wo.weight", "placements": ["Shard(0)", "Shard(1)"]},
  ///       {"names": "layers.[0-3].*", "placements": ["Stage(0)", "Shard(0)"]},
  ///       {"names": "*", "placements": ["Shard(0)", "Replicate"]}]}
  /// Throws: Error(corruption) naming `path`, the member and the rule.
  static MeshLayout from_json(std::string_view text, const std::string& path);

  /// Returns which ranks hold which boxes of a tensor, ordered by box; no box is empty. Each cut is
  /// that of torch.chunk. If several axes cut one dimension, the last axis cuts first, as FSDP2
  /// does over tensor parallelism. All ranks hold tensors that cannot be cut (0-d or empty).
  /// Throws: Error(invalid_argument) naming the tensor if no rule matches, or if its rule cuts a
  /// dimension that it does not have.
  std::vector<Shard> shards_of(std::string_view name, std::span<const std::int64_t> shape) const;
};

}  // namespace tessera
