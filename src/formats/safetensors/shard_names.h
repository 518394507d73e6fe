#pragma once

#include <optional>
#include <string_view>

#include "formats/shard_files.h"

namespace tessera::formats::detail {

/// The end of the name of every index file. An index maps each tensor of a sharded checkpoint to
/// its file.
inline constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
inline constexpr ShardNaming kShardNaming{"model", ".safetensors", kIndexSuffix};

/// Returns the place that a file's name states, such as 2 of 3; nothing if the name has no place.
std::optional<PlaceInSeries> place_in_series(std::string_view name);

}  // namespace tessera::formats::detail
