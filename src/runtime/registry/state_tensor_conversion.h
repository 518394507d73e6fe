#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/runtime/dist/group.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

// Converts tensors of state dicts between layouts: builds whole tensors, or shards of other
// regions, from shards.

namespace tessera::state {

/// Copies the elements that `source` and `destination`, shards of one tensor of `shape`, share.
/// Returns their number. Requires: both are contiguous and of the same dtype.
std::int64_t copy_common(const Shape& shape, const LocalShard& source, LocalShard& destination);

/// Returns the elements of a region, as a view of a local shard if possible, else as a copy.
/// Returns nullopt if this rank does not hold all of them. Shape: `[numel]`.
std::optional<at::Tensor> cut(const StateTensor& entry, const Region& region);

/// Returns whether two tensors of one dtype have the same bits. Shapes may differ.
bool have_same_elements(const at::Tensor& a, const at::Tensor& b);

/// Returns the layout of a tensor of which each rank has a copy of its own, such as a buffer. The
/// layout names rank 0 alone: a save writes rank 0's copy, and a load gives it to all ranks.
std::vector<Shard> layout_of_own_copies(const Shape& shape);

/// Returns the regions that a rank holds according to the entry's layout. An empty layout means
/// that every rank holds everything.
std::vector<Region> regions_of_rank(const StateTensor& entry, int rank);

/// Returns a copy of the entry with its whole tensor. With `rank0_only` the other ranks' entries
/// have no elements, and rank 0 needs memory for the tensor and one shard only. Collective over
/// `world`, whose ranks are those of the layout.
StateTensor gather(const StateTensor& entry, dist::Group& world, const StateDictOptions& options,
                   const std::string& fqn);

/// Converts an entry of type SHARDED to `options.type`. Collective over `world` for FULL.
StateTensor as_asked(StateTensor entry, dist::Group& world, const StateDictOptions& options,
                     const std::string& fqn);

/// For the state dict post hook of a module with sharded parameters. Replaces the entry `fqn` by
/// `entry` (type SHARDED), converted to the type in `options`. Does nothing for an alias.
/// Collective over `world` for FULL.
void show_whole(StateDict& state_dict, const std::string& fqn, StateTensor entry,
                dist::Group& world, const StateDictOptions& options);

/// For the load pre hook of a module with sharded parameters. Replaces the entry `fqn` by this
/// rank's shard, with the region of `own` and the shape of `parameter`. If the entry does not fit,
/// reports this and uses an uninitialised shard. Does nothing for missing entries and aliases,
/// which the load handles later.
void show_local_shard(StateDict& state_dict, const std::string& fqn, const StateTensor& own,
                      const at::Tensor& parameter, LoadReport& report);

/// Sends each rank its shards of rank 0's whole tensor. `whole`: on rank 0 the whole tensor; not
/// used on other ranks. `wanted`: this rank's entry, whose shards are overwritten. Collective over
/// `world`.
void scatter(const StateTensor* whole, const StateTensor& wanted, dist::Group& world,
             const std::string& fqn);

}  // namespace tessera::state
