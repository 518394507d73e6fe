#pragma once

#include <cstddef>
#include <cstdint>
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
/// changes nothing, if the text does not have the number of each entry once.
bool set_key_order(CheckpointContents& contents, std::string_view text);

}  // namespace tessera::formats
