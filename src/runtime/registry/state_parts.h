#pragma once

#include <optional>
#include <string>

#include "tessera/runtime/dist/group.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

// Whole tensors from parts, and parts from others, whatever regions they are.

namespace tessera::state {

/// Copies what `source` has of `destination` into it: elements in the regions' own orders. Returns
/// how many elements the two share. Requires: both contiguous and of the same dtype.
std::int64_t copy_common(const Shape& shape, const TensorPart& source, TensorPart& destination);

/// Returns the elements of a region out of what is held here, as a view where it can be one.
/// Nothing where some are not held. Shape: `[numel]`.
std::optional<at::Tensor> cut(const StateTensor& entry, const Region& region);

/// Returns what a rank holds by an entry's layout; a layout that is empty: all of it.
std::vector<Region> regions_of_rank(const StateTensor& entry, int rank);

/// Returns the entry with its tensor whole, in memory of its own; with `rank0_only` without parts
/// on other ranks, which then take no memory, and rank 0 beside the tensor that of one shard.
/// Collective over `world`, which the layout's ranks count in.
StateTensor gather(const StateTensor& entry, dist::Group& world, const StateDictOptions& options,
                   const std::string& fqn);

/// Returns an entry of type SHARDED as a state dict of these options has it. Collective over
/// `world` for FULL.
StateTensor as_asked(StateTensor entry, dist::Group& world, const StateDictOptions& options,
                     const std::string& fqn);

/// For a hook behind the walk of a module that holds but a part: puts `entry`, of type SHARDED, as
/// these options have it in the place of what the walk found, under whatever key an earlier hook
/// has put that. An alias stays. Collective over `world` for FULL.
void show_whole(StateDict& state_dict, const std::string& fqn, StateTensor entry,
                dist::Group& world, const StateDictOptions& options);

/// For a hook before such a module is loaded: puts this rank's part of the entry, `own` as
/// `parameter` shows it, in the entry's place, for the walk to load. Also where the entry does not
/// fit, which is reported: the walk then finds what fits. What is not there is told by the walk; an
/// alias is dealt with under its target's name.
void show_part(StateDict& state_dict, const std::string& fqn, const StateTensor& own,
               const at::Tensor& parameter, LoadReport& report);

/// Sends each rank its parts of what rank 0 holds whole. `wanted`: the entry as every rank has it,
/// with parts of the right sizes that are overwritten. Collective over `world`.
void scatter(const StateTensor* whole, const StateTensor& wanted, dist::Group& world,
             const std::string& fqn);

}  // namespace tessera::state
