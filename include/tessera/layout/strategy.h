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

/// A region of a tensor, and the ranks that hold it: one rank, or several that each hold a replica.
struct Shard {
  Region region;
  std::vector<int> ranks;  // ascending
  friend bool operator==(const Shard&, const Shard&) = default;
};

/// The rule that distributes tensors over the ranks. The names of the rules:
/// - `replicated`: every rank holds every tensor, whole;
/// - `flat` (FSDP1's FULL_SHARD, SHARD_GRAD_OP): cuts each unit's flat parameter into equal ranges;
/// - `dim0` (FSDP2): cuts the rows as torch.chunk does; `dim1`: the columns (1-d tensors: as dim0);
/// - `hybrid:AxB`: A replicas, each cut over B ranks as by `dim0`;
/// - `hybrid-flat:AxB`: A replicas, each cut over B ranks as by `flat`.
/// In the hybrid rules, rank = replica * B + shard, as in a DeviceMesh of shape (A, B).
struct Strategy {
  /// How one replica cuts a tensor into shards.
  enum class Sharding { replicated, flat, dim0, dim1 };
  Sharding sharding = Sharding::replicated;
  int num_replicas = 1;  // A; the world size if `replicated`
  int num_shards = 1;    // B; 1 if `replicated`

  int world_size() const { return num_replicas * num_shards; }
  friend bool operator==(const Strategy&, const Strategy&) = default;
};

/// The most ranks a layout may have.
inline constexpr int kMaxWorldSize = 1'000'000;

/// Parses a strategy for `world_size` ranks. If `world_size` is 0, the world size is A * B for a
/// hybrid strategy, and 1 for any other. Throws: Error(invalid_argument) if the text is no strategy
/// (lists the names), if A * B is not `world_size`, or if there are over kMaxWorldSize ranks.
Strategy parse_strategy(std::string_view text, int world_size);

/// Returns a text from which parse_strategy, with the same world size, makes this strategy again.
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
/// tensor exactly once. No shard is empty, except the one shard of an empty tensor. All ranks hold
/// the whole tensor if it cannot be cut (0-d or empty), or if the strategy is `flat` and `place` is
/// null, because the tensor (a buffer) is in no unit. Other strategies ignore `place`.
/// Shape: `shape` is that of the whole tensor. Requires: the strategy came from parse_strategy.
std::vector<Shard> shards_of(const Strategy& strategy, std::span<const std::int64_t> shape,
                             const FlatUnitIndex::Place* place = nullptr);

/// How one axis of a mesh spreads a tensor. A rank has one index on each axis, from 0.
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
  std::vector<Rule> rules;  // the first rule that matches a name is used
  std::string path{};       // of the file with the rules, for errors

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
  /// first, as FSDP2 does on top of tensor parallelism. All ranks hold a 0-d or empty tensor whole.
  /// Throws: Error(invalid_argument) naming the file and the tensor if no rule matches, or if the
  /// rule cuts a dimension that the tensor does not have.
  std::vector<Shard> shards_of(std::string_view name, std::span<const std::int64_t> shape) const;

  /// The rule for a tensor, or the reason why no rule applies.
  struct RuleChoice {
    const Rule* rule = nullptr;  // null: none matches, or the tensor (0-d or empty) is never cut
    std::string expected{};      // for the error that shards_of throws; empty: it throws none
    std::string found{};
  };
  /// Returns the rule by which `shards_of` cuts a tensor. Does not throw if no rule applies.
  RuleChoice choose_rule(std::string_view name, std::span<const std::int64_t> shape) const;
};

}  // namespace tessera
