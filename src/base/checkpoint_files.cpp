#include "base/checkpoint_files.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::detail {
namespace {

bool is_checkpoint_file_name(std::string_view name) {
  if (name.ends_with(StagedDestination::kSuffix)) {
    name.remove_suffix(StagedDestination::kSuffix.size());
  }
  return std::ranges::any_of(std::array{".h5", ".safetensors", ".safetensors.index.json",
                                        ".values.json", ".distcp", ".metadata"},
                             [&](std::string_view end) { return name.ends_with(end); });
}

}  // namespace

std::optional<std::string> first_foreign_entry(const FileSystem& fs, const std::string& directory) {
  for (std::string& name : fs.list_directory(directory)) {
    const bool is_file = fs.kind_of(join_path(directory, name)) == FileKind::regular;
    if (!is_file || !is_checkpoint_file_name(name)) return std::move(name);
  }
  return std::nullopt;
}

}  // namespace tessera::detail
