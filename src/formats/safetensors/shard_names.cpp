#include "formats/safetensors/shard_names.h"

namespace tessera::formats::detail {

std::optional<PlaceInSeries> place_in_series(std::string_view name) {
  return place_in_series(name, kShardNaming.file_suffix);
}

std::string common_stem(const FileSystem& fs, const std::vector<std::string>& paths) {
  std::optional<std::string> common;
  for (const std::string& path : paths) {
    std::string stem = last_component(path);
    if (!stem.ends_with(kShardNaming.file_suffix)) continue;
    if (const auto place = place_in_series(stem)) {
      stem = place->series;
      if (stem.ends_with('-')) stem.pop_back();
      const std::string index = stem + std::string(kIndexSuffix);
      if (!fs.kind_of(join_path(directory_of(path), index))) return {};
    } else {
      stem.resize(stem.size() - kShardNaming.file_suffix.size());
    }
    if (stem.find('.') != std::string::npos || stem != common.value_or(stem)) return {};
    common = std::move(stem);
  }
  return common.value_or("");
}

}  // namespace tessera::formats::detail
