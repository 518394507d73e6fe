#include "formats/staging/own_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <vector>

#include "base/named_object.h"
#include "formats/staging/staged_destination.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

using IsOwn = std::function<bool(std::string_view whole_name)>;

bool is_of_our_writers(std::string_view name) {
  return std::ranges::any_of(format_drivers(),
                             [&](const FormatDriver* driver) { return driver->writes_file(name); });
}

std::string_view without_suffix(std::string_view name) {
  if (name.ends_with(StagedDestination::kSuffix)) {
    name.remove_suffix(StagedDestination::kSuffix.size());
  }
  return name;
}

/// Returns a function that says whether a name belongs to the format of a directory. This is the
/// first format that may own any of `names`. Names of complete files are tried before names of
/// files that are being written.
IsOwn names_of_one_format(const std::vector<std::string>& names) {
  for (const bool is_whole : {true, false}) {
    for (const FormatDriver* driver : format_drivers()) {
      const IsOwn is_own = [driver](std::string_view name) { return driver->may_own_file(name); };
      const bool has_any = std::ranges::any_of(names, [&](const std::string& name) {
        return is_own(is_whole ? name : without_suffix(name));
      });
      if (has_any) return is_own;
    }
  }
  return [](std::string_view) { return false; };
}

}  // namespace

bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name) {
  return is_of_our_writers(without_suffix(name)) &&
         fs.kind_of(join_path(directory, name)) == FileKind::regular;
}

bool is_plain_file(const std::string& path) {
  const auto mode = tessera::detail::mode_of_name(path);
  return mode && S_ISREG(*mode);
}

std::optional<std::string> first_foreign_entry(
    const FileSystem& fs, const std::string& directory, FileNames names,
    const std::function<bool(const std::string& name)>& is_extra) {
  std::vector<std::string> entries = fs.list_directory(directory);
  const IsOwn is_own =
      names == FileNames::of_our_writers ? is_of_our_writers : names_of_one_format(entries);
  for (std::string& name : entries) {
    const std::string path = join_path(directory, name);
    if (is_own(without_suffix(name)) && fs.kind_of(path) == FileKind::regular) continue;
    if (is_extra && is_plain_file(path) && is_extra(name)) continue;
    return std::move(name);
  }
  return std::nullopt;
}

}  // namespace tessera::formats
