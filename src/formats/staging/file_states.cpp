#include "formats/staging/file_states.h"

#include <algorithm>
#include <cerrno>

#include "base/file_descriptor.h"
#include "base/named_object.h"
#include "formats/staging/own_files.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

bool is_folder_of_a_format(const std::string& name) {
  return std::ranges::any_of(
      format_drivers(), [&](const FormatDriver* driver) { return driver->may_own_folder(name); });
}

bool is_same_time(const std::timespec& a, const std::timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

}  // namespace

bool is_unchanged(const FileState& before, const FileState& after) {
  return before.inode == after.inode && before.nbytes == after.nbytes &&
         is_same_time(before.modified, after.modified) &&
         (before.num_links != 1 || after.num_links != 1 ||
          is_same_time(before.changed, after.changed));
}

FileStates file_states_at(const FileSystem& fs, const std::string& path) {
  FileStates states;
  const auto add = [&](const std::string& file) {
    struct stat status {};
    if (::lstat(file.c_str(), &status) == 0) {
      states[file] = {status.st_ino, status.st_nlink, status.st_size, status.st_mtim,
                      status.st_ctim};
    } else if (errno != ENOENT && errno != ENOTDIR) {
      tessera::detail::throw_system_error(errno, file, "stat");
    }
  };
  const auto mode = tessera::detail::mode_of_name(path);
  if (!mode || !S_ISDIR(*mode)) {
    add(path);
  } else {
    for (const std::string& name : fs.list_directory(path)) {
      const std::string entry = join_path(path, name);
      add(entry);
      if (!is_folder_of_a_format(name) || !is_plain_folder(entry)) continue;
      for (const std::string& file : list_files_within(fs, entry)) add(join_path(entry, file));
    }
  }
  return states;
}

void require_file_states(const FileSystem& fs, const std::string& path, const FileStates& before,
                         const std::function<bool(const std::string& file)>& is_kept) {
  for (const auto& [file, state] : file_states_at(fs, path)) {
    const auto known = before.find(file);
    const bool is_new = known == before.end();
    if ((!is_new && is_unchanged(known->second, state)) || (is_kept && is_kept(file))) continue;
    throw Error(ErrorKind::already_exists, {.path = file},
                std::string("destination: this file has ") + (is_new ? "appeared" : "changed") +
                    " since this run started, and would be removed with the replaced checkpoint "
                    "(nothing was replaced; run again to replace this file too)");
  }
}

}  // namespace tessera::formats
