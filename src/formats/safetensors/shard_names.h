#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/shard_files.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::detail {

/// The end of the name of every index file. An index maps each tensor of a sharded checkpoint to
/// its file.
inline constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
inline constexpr ShardNaming kShardNaming{"model", ".safetensors", kIndexSuffix};

/// Returns the place that a file's name states, such as 2 of 3; nothing if the name has no place.
std::optional<PlaceInSeries> place_in_series(std::string_view name);

/// Returns the stem that all tensor files among `paths` have, such as `diffusion_pytorch_model`, by
/// which loaders find them. Empty if they have several, or one that new files cannot have: indexes
/// of variants (`model.fp16`) have other names, and files of ranks (`shard-00001-model`) have none.
std::string common_stem(const FileSystem& fs, const std::vector<std::string>& paths);

}  // namespace tessera::formats::detail
