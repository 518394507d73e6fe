#pragma once

#include <cstddef>
#include <map>
#include <set>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_files {

/// The keys of each dict and list, by its key path. A value or tensor has no keys.
using Containers = std::map<KeyPath, std::set<Key>>;

/// Adds the keys of `path`, an entry's key path, to the dicts and lists around the entry. Leaves
/// out those at the first `num_joined` keys, which may have other keys on each rank.
void add_containers(Containers& containers, const KeyPath& path, std::size_t num_joined);
/// Adds the containers of one more rank, except those that have other keys than on earlier ranks,
/// and all that is inside them. Returns the outermost containers that were not added.
std::set<KeyPath> merge_containers(Containers& containers, const Containers& of_rank);
/// Returns the path in `paths` that `path` begins with; null if it begins with none of them.
/// Requires: no path in `paths` begins with another one.
const KeyPath* prefix_of(const KeyPath& path, const std::set<KeyPath>& paths);

}  // namespace tessera::formats::torch_files
