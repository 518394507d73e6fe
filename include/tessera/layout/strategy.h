#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/shape.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/layout/region.h"

namespace tessera {

/// A region of a tensor and the ranks that hold it: one rank, or several with a replica each.
struct Shard {
  Region region;
  std::vector<int> ranks;  // ascending
  friend bool operator==(const Shard&, const Shard&) = default;
};

/// The rule that distributes tensors over the ranks.
///
/// Names: `replicated`; `flat` (FULL_SHARD and SHARD_GRAD_OP of FSDP1: each unit's flat parameter
/// cut into equal ranges); `dim0` (FSDP2: rows, cut as torch.chunk does); `dim1` (columns, cut
/// in the same way; tensors of one dimension as `dim0`); `hybrid:AxB` (dim0 over B ranks,
/// replicated A times) and `hybrid-flat:AxB` (the same with flat). In a hybrid world,
/// rank = replica * B + shard, as in a device mesh of shape (A, B).
struct Strategy {
  /// How one replica cuts a tensor into shards.
  enum class Sharding { replicated, flat, dim0, dim1 };
  Sharding sharding = Sharding::replicated;
  int num_replicas = 1;  // A
  int num_shards = 1;    // B; all ranks hold everything if `replicated`

  int world_size() const { return num_replicas * num_shards; }
  friend bool operator==(const Strategy&, const Strategy&) = default;
};

/// The most ranks a layout may have.
inline constexpr int kMaxWorldSize = 1'000'000;

/// Parses a strategy for `world_size` ranks. If `world_size` is 0, the world size is A * B for a
/// hybrid strategy, and 1 for any other. Throws: Error(invalid_argument) that lists the allowed
/// names, or that has both numbers if A * B is not the world size.
Strategy parse_strategy(std::string_view text, int world_size);

/// Returns the text that parse_strategy reads.
std::string strategy_to_string(const Strategy& strategy);

/// An index from each parameter's fqn to its flat unit.
class FlatUnitIndex {
 public:
  /// Keeps a view of `units`, which must outlive the index and not move.
  explicit FlatUnitIndex(std::span<const FlatUnit> units);

  /// A parameter and its unit, both in `units`.
  struct Place {
    const FlatUnit* unit;
    const FlatUnitParameter* parameter;
  };
  /// Returns nullptr if no unit has that parameter.
  const Place* find(const std::string& fqn) const;

 private:
  std::map<std::string, Place> places_;
};

/// Returns which ranks hold which regions of a tensor, ordered by region. The regions cover the
/// tensor exactly once. No shard is empty, except the one shard of an empty tensor. All ranks
/// hold tensors that cannot be cut (0-d or empty) and, under `flat`, tensors in no unit
/// (buffers). Shape: `shape` is that of the whole tensor. Requires: the strategy came from
/// parse_strategy.
std::vector<Shard> shards_of(const Strategy& strategy, std::span<const std::int64_t> shape,
                             const FlatUnitIndex::Place* place = nullptr);

/// How a tensor is spread along one axis of a mesh: whole on all indices, cut, or on one only.
struct MeshPlacement {
  enum class Kind {
    replicate,  // every index of the axis has the same elements
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
  /// How the tensors of some names are cut.
  struct Rule {
    std::string names;                      // a glob; see glob_match
    std::vector<MeshPlacement> placements;  // one for each axis of the mesh
  };
  std::vector<int> shape;
  std::vector<Rule> rules;  // for each name, the first that matches is used
  std::string path{};       // of the file, for errors

  /// Returns the product of the axes' sizes.
  int world_size() const;

  /// Parses a file such as
  ///     {"schema": 1, "mesh": [2, 4], "rules": [
  ///       {"names": "*.wo.weight", "placements": ["Shard(0)", "Shard(1)"]},
  ///       {"names": "layers.[0-3].*", "placements": ["Stage(0)", "Shard(0)"]},
  ///       {"names": "*", "placements": ["Shard(0)", "Replicate"]}]}
  /// Throws: Error(corruption) naming `path`, the member, and the number of its rule, from 0.
  static MeshLayout from_json(std::string_view text, const std::string& path);

  /// Returns which ranks hold which boxes of a tensor, ordered by box. Each cut is that of
  /// torch.chunk, without the empty boxes. If several axes cut one dimension, the last axis cuts
  /// first, as FSDP2 does over tensor parallelism. All ranks hold a 0-d or empty tensor, whole.
  /// Throws: Error(invalid_argument) naming the file and the tensor if no rule matches, or if the
  /// rule cuts a dimension that the tensor does not have.
  std::vector<Shard> shards_of(std::string_view name, std::span<const std::int64_t> shape) const;

  /// The rule for a tensor, or the reason why no rule applies.
  struct RuleChoice {
    const Rule* rule = nullptr;  // the first that matches; none if the tensor cannot be cut
    std::string expected{};      // for the error; empty if there is no error
    std::string found{};
  };
  /// Returns the rule by which `shards_of` cuts a tensor.
  RuleChoice choose_rule(std::string_view name, std::span<const std::int64_t> shape) const;
};

}  // namespace tessera
