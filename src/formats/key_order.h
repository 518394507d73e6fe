#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"

// The order of the keys of dicts ([Note: Order of keys] in checkpoint.h). The functions here number
// the entries of a checkpoint: first its tensors, then its aliases, then its values.
namespace tessera::formats {

/// Returns the numbers of all entries in the order of a walk through the nested dicts and lists.
std::vector<std::uint32_t> entries_in_dict_order(const CheckpointContents& contents);

/// Returns the names of tensors and aliases in that order.
std::vector<std::string> names_in_dict_order(const CheckpointContents& contents);

/// Returns how many dicts have their keys in another order than the sort order of Key.
std::size_t num_reordered_dicts(const CheckpointContents& contents);

/// Returns `entries_in_dict_order` as a text, such as `2,0-1`. Returns an empty text if
/// `num_reordered_dicts` is 0.
std::string key_order_text(const CheckpointContents& contents);

/// Sets the `dict_order` of all entries from the result of `key_order_text`. Returns false, and
/// changes nothing, unless the text has the number of each entry exactly once.
bool set_key_order(CheckpointContents& contents, std::string_view text);

/// The place of an entry of a merge in one of its sources.
struct PlaceInSource {
  std::size_t source;
  std::uint32_t dict_order;  // in this source
};

/// Sets the `dict_order` of all entries of a merge. Returns how many dicts lose the order of their
/// keys, and get the sort order of Key instead. If one source has all keys of a dict, the dict gets
/// that source's order. Otherwise, if it is the outermost dict of all its sources, and at most one
/// of them has tensors as items, it gets the keys of the first source, then those that the next one
/// adds, and so on. Any other dict loses its order, unless that order is the sort order of Key. A
/// dict also loses its order if two sources order its keys differently. `places[i]`: where the
/// sources have entry `i`; the merge takes the first place. `root_depths[s]`: how many keys the
/// merge puts before those of source `s`.
std::size_t merge_key_orders(CheckpointContents& contents,
                             const std::vector<std::vector<PlaceInSource>>& places,
                             std::span<const std::size_t> root_depths);

}  // namespace tessera::formats
