#include "base/checkpoint_files.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::detail {
namespace {

bool is_of_any_checkpoint(std::string_view name) {
  return std::ranges::any_of(std::array{".h5", ".safetensors", ".safetensors.index.json",
                                        ".values.json", ".distcp", ".metadata"},
                             [&](std::string_view end) { return name.ends_with(end); });
}

/// A `#` in the pattern stands for a number.
bool matches(std::string_view name, std::string_view pattern) {
  for (const char expected : pattern) {
    const std::size_t num_taken = expected == '#'
                                      ? std::min(name.find_first_not_of("0123456789"), name.size())
                                      : std::size_t{name.starts_with(expected)};
    if (num_taken == 0) return false;
    name.remove_prefix(num_taken);
  }
  return name.empty();
}

bool is_of_our_writers(std::string_view name) {
  return std::ranges::any_of(
      std::array{"index.h5", "rank-#.h5", ".metadata", "__#_#.distcp", "model.safetensors",
                 "model-#-of-#.safetensors", "model.safetensors.index.json",
                 "model.safetensors.values.json"},
      [&](std::string_view pattern) { return matches(name, pattern); });
}

}  // namespace

bool is_checkpoint_file(const FileSystem& fs, const std::string& directory, const std::string& name,
                        FileNames names) {
  std::string_view whole_name = name;
  if (whole_name.ends_with(StagedDestination::kSuffix)) {
    whole_name.remove_suffix(StagedDestination::kSuffix.size());
  }
  return (names == FileNames::of_our_writers ? is_of_our_writers(whole_name)
                                             : is_of_any_checkpoint(whole_name)) &&
         fs.kind_of(join_path(directory, name)) == FileKind::regular;
}

std::optional<std::string> first_foreign_entry(const FileSystem& fs, const std::string& directory,
                                               FileNames names) {
  for (std::string& name : fs.list_directory(directory)) {
    if (!is_checkpoint_file(fs, directory, name, names)) return std::move(name);
  }
  return std::nullopt;
}

}  // namespace tessera::detail
