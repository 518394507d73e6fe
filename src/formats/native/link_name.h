#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "tessera/layout/region.h"

namespace tessera::formats::native {

/// The HDF5 group for everything that is not a tensor. No escaped FQN starts with this name.
inline constexpr const char* kOwnGroup = "~tessera";
inline constexpr const char* kIndexDataset = "index";
inline constexpr const char* kBlocksDataset = "blocks";
inline constexpr const char* kValuesDataset = "values";
inline constexpr const char* kHiddenDataset = "hidden";  // tensors that HDF5 readers do not see
/// The ends of the link names of a patch's datasets; the piece's link name comes before.
inline constexpr const char* kRowNumbersSuffix = "~row_numbers";
inline constexpr const char* kRowsSuffix = "~rows";

/// Returns the HDF5 link name of a tensor or alias: valid UTF-8 without `/`, different for
/// different FQNs. `number`: a tensor's position in the list of tensors of the file's index; for
/// an alias, the number of tensors plus its position in the list of aliases. If the FQN is too
/// long for a link name, the link name is the beginning of the FQN and this number.
std::string tensor_link_name(std::string_view fqn, std::size_t number);

/// Returns the link name of a piece: the tensor's link name and the region.
std::string piece_link_name(std::string_view fqn, std::size_t number, const Region& region);

}  // namespace tessera::formats::native
