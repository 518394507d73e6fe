#include "formats/staging/own_files.h"

#include <algorithm>
#include <functional>
#include <string_view>
#include <vector>

#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "object_store/stored_objects.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

using IsOwn = std::function<bool(std::string_view whole_name)>;

constexpr int kMaxFolders = 8;  // depth of nested folders

/// The rule that decides which files and folders belong to a checkpoint.
struct OwnNames {
  IsOwn is_file;
  std::vector<const FormatDriver*> drivers;  // formats that may have folders
};

bool is_added(const std::string& name, const std::vector<std::string>& names) {
  return std::ranges::any_of(
      format_drivers(), [&](const FormatDriver* driver) { return driver->adds_file(name, names); });
}

bool is_of_our_writers(std::string_view name) {
  return std::ranges::any_of(format_drivers(),
                             [&](const FormatDriver* driver) { return driver->writes_file(name); });
}

void add_files_within(const FileSystem& fs, const std::string& directory, const std::string& folder,
                      int num_folders, std::vector<std::string>& files) {
  for (const std::string& name : fs.list_directory(join_path(directory, folder))) {
    std::string path = folder.empty() ? name : join_path(folder, name);
    if (num_folders < kMaxFolders && is_plain_folder(join_path(directory, path))) {
      add_files_within(fs, directory, path, num_folders + 1, files);
    } else {
      files.push_back(std::move(path));
    }
  }
}

/// Returns the first entry in a folder that `is_own` refuses or that is not a regular file. Returns
/// it as a path relative to `directory`.
std::optional<std::string> first_foreign_within(const FileSystem& fs, const std::string& directory,
                                                const std::string& folder, const IsOwn& is_own) {
  std::vector<std::string> files;
  add_files_within(fs, directory, folder, 1, files);
  for (std::string& file : files) {
    if (!is_own(file) || !is_plain_file(join_path(directory, file))) return std::move(file);
  }
  return std::nullopt;
}

std::string_view without_suffix(std::string_view name) {
  if (name.ends_with(StagedDestination::kSuffix)) {
    name.remove_suffix(StagedDestination::kSuffix.size());
  }
  return name;
}

/// Returns the rule of one format: the first format that may own any of `names`. First tries the
/// names of complete files for all formats, then the names of files that are being written.
OwnNames names_of_one_format(const std::vector<std::string>& names) {
  for (const bool is_whole : {true, false}) {
    for (const FormatDriver* driver : format_drivers()) {
      const IsOwn is_own = [driver](std::string_view name) { return driver->may_own_file(name); };
      const bool has_any = std::ranges::any_of(names, [&](const std::string& name) {
        return is_own(is_whole ? name : without_suffix(name)) || driver->may_own_folder(name);
      });
      if (has_any) return {is_own, {driver}};
    }
  }
  return {[](std::string_view) { return false; }, {}};
}

/// Returns the first file in the folder `name` that belongs to no checkpoint. Returns `name` itself
/// if no format has such a folder, and nothing if all files belong to one format.
std::optional<std::string> foreign_in_folder(const FileSystem& fs, const std::string& directory,
                                             const std::string& name, FileNames names,
                                             const std::vector<const FormatDriver*>& drivers) {
  for (const FormatDriver* driver : drivers) {
    if (!driver->may_own_folder(name)) continue;
    return first_foreign_within(fs, directory, name, [&](std::string_view path) {
      return names == FileNames::of_our_writers ? driver->writes_file(path)
                                                : driver->may_own_file(path);
    });
  }
  return name;
}

}  // namespace

bool is_file_of_our_writers(const FileSystem& fs, const std::string& directory,
                            const std::string& name) {
  if (is_plain_folder(join_path(directory, name))) {
    return !foreign_in_folder(fs, directory, name, FileNames::of_our_writers, format_drivers());
  }
  return is_of_our_writers(without_suffix(name)) &&
         fs.kind_of(join_path(directory, name)) == FileKind::regular;
}

bool is_plain_folder(const std::string& path) {
  const auto object = object_store::find_name(path);
  return object && object->kind == object_store::NamedObject::Kind::folder;
}

std::vector<std::string> list_files_within(const FileSystem& fs, const std::string& directory) {
  std::vector<std::string> files;
  add_files_within(fs, directory, {}, 0, files);
  return files;
}

bool has_file_in(const std::set<std::string>& paths, const std::string& folder) {
  const std::string prefix = folder + "/";
  const auto next = paths.lower_bound(prefix);
  return next != paths.end() && next->starts_with(prefix);
}

bool is_plain_file(const std::string& path) {
  const auto object = object_store::find_name(path);
  return object && object->kind == object_store::NamedObject::Kind::file;
}

std::optional<std::string> first_foreign_entry(
    const FileSystem& fs, const std::string& directory, FileNames names,
    const std::function<bool(const std::string& name)>& is_extra) {
  const std::vector<std::string> entries = fs.list_directory(directory);
  const OwnNames own = names == FileNames::of_our_writers
                           ? OwnNames{is_of_our_writers, format_drivers()}
                           : names_of_one_format(entries);
  for (const std::string& name : entries) {
    if (name == object_store::kIncompleteMark) continue;
    const std::string path = join_path(directory, name);
    if (is_plain_folder(path)) {
      auto foreign = foreign_in_folder(fs, directory, name, names, own.drivers);
      if (foreign) return foreign;
      continue;
    }
    const bool is_own = own.is_file(without_suffix(name)) || is_added(name, entries);
    if (is_own && fs.kind_of(path) == FileKind::regular) continue;
    if (is_extra && is_plain_file(path) && is_extra(name)) continue;
    return name;
  }
  return std::nullopt;
}

}  // namespace tessera::formats
