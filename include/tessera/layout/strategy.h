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

/// A region of a tensor and the ranks that hold it: one, or all replicas. Never empty of ranks.
struct Shard {
  Region region;
  std::vector<int> ranks;  // ascending
  friend bool operator==(const Shard&, const Shard&) = default;
};

/// The rule by which a world of ranks shares out tensors.
///
/// Names: `replicated`; `flat` (FULL_SHARD and SHARD_GRAD_OP of FSDP1: each unit's flat parameter
/// cut into equal ranges); `dim0` (FSDP2: rows, cut as torch.chunk does); `hybrid:AxB` (dim0 over
/// B ranks, replicated A times) and `hybrid-flat:AxB` (flat over B ranks). In a hybrid world,
/// rank = replica * B + shard, as in a device mesh of shape (A, B).
struct Strategy {
  /// How the shards of one replica cut a tensor.
  enum class Sharding { replicated, flat, dim0 };
  Sharding sharding = Sharding::replicated;
  int num_replicas = 1;  // A
  int num_shards = 1;    // B; all ranks hold everything where the sharding is `replicated`

  int world_size() const { return num_replicas * num_shards; }
  friend bool operator==(const Strategy&, const Strategy&) = default;
};

/// The most ranks a layout may have.
inline constexpr int kMaxWorldSize = 1 << 20;

/// Returns the strategy that `text` names, for `world_size` ranks (0: taken from a hybrid's AxB,
/// else 1). Throws: Error(invalid_argument) that names what is allowed, or both numbers where a
/// hybrid's product is not the world size.
Strategy parse_strategy(std::string_view text, int world_size);

/// Returns the text that parse_strategy reads.
std::string strategy_to_string(const Strategy& strategy);

/// Knows, for every parameter, which flat unit it lies in.
class FlatUnitIndex {
 public:
  /// Keeps a view of `units`, which must outlive it and stay in place.
  explicit FlatUnitIndex(std::span<const FlatUnit> units);

  /// A parameter and its unit, in the units that the index was made for.
  struct Place {
    const FlatUnit* unit;
    const FlatUnitParameter* parameter;
  };
  /// Returns nullptr where no unit holds that parameter.
  const Place* find(const std::string& fqn) const;

 private:
  std::map<std::string, Place> places_;
};

/// Returns who holds what of a tensor, in order of region; regions cover it exactly once and none
/// is empty, unless the tensor is: then one empty shard. Tensors that cannot be cut (0-d, no
/// elements) are held by all ranks, and so are under `flat` those in no unit (buffers).
/// Shape: `shape` is the global one. Requires: the strategy came from parse_strategy.
std::vector<Shard> shards_of(const Strategy& strategy, std::span<const std::int64_t> shape,
                             const FlatUnitIndex::Place* place = nullptr);

}  // namespace tessera
