#include "base/checkpoint_files.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

namespace tessera::detail {
namespace {

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

std::string_view without_suffix(std::string_view name) {
  if (name.ends_with(StagedDestination::kSuffix)) {
    name.remove_suffix(StagedDestination::kSuffix.size());
  }
  return name;
}

bool is_of_native(std::string_view name) {
  return name == "index.h5" || matches(name, "rank-#.h5");
}

bool is_of_dcp(std::string_view name) {
  return name == ".metadata" || matches(name, "__#.metadata") || name.ends_with(".distcp");
}

bool is_of_safetensors(std::string_view name) {
  return std::ranges::any_of(std::array{".safetensors", ".safetensors.index.json", ".values.json"},
                             [&](std::string_view end) { return name.ends_with(end); });
}

using IsOfFormat = bool (*)(std::string_view whole_name);

/// Returns what the names of a directory are to be, by the first format that has any of them.
IsOfFormat format_of(const std::vector<std::string>& names) {
  for (const IsOfFormat is_of_format : {is_of_native, is_of_dcp}) {
    const bool has_any = std::ranges::any_of(
        names, [&](const std::string& name) { return is_of_format(without_suffix(name)); });
    if (has_any) return is_of_format;
  }
  return is_of_safetensors;
}

}  // namespace

bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name) {
  return is_of_our_writers(without_suffix(name)) &&
         fs.kind_of(join_path(directory, name)) == FileKind::regular;
}

std::optional<std::string> first_foreign_entry(const FileSystem& fs, const std::string& directory,
                                               FileNames names) {
  std::vector<std::string> entries = fs.list_directory(directory);
  const IsOfFormat is_own =
      names == FileNames::of_our_writers ? is_of_our_writers : format_of(entries);
  for (std::string& name : entries) {
    if (!is_own(without_suffix(name)) ||
        fs.kind_of(join_path(directory, name)) != FileKind::regular) {
      return std::move(name);
    }
  }
  return std::nullopt;
}

}  // namespace tessera::detail
