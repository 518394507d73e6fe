#pragma once

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::detail {

/// Returns the kind of an object with this mode in words, such as `a file`.
inline std::string_view kind_in_words(mode_t mode) {
  if (S_ISREG(mode)) return "a file";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISLNK(mode)) return "a link";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

/// Returns what lstat says about the object at `path` (a link itself, not its target); nothing if
/// nothing is there, or if the name is too long for the file system.
/// Throws: Error(io) if that cannot be told: a network file system may fail for a moment.
inline std::optional<struct stat> status_of_name(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) return status;
  if (errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG) return std::nullopt;
  throw_system_error(errno, path, "stat");
}

/// Returns the mode of the object at `path`; nothing if nothing is there. Does not follow a link.
/// Throws: as `status_of_name`.
inline std::optional<mode_t> mode_of_name(const std::string& path) {
  const auto status = status_of_name(path);
  return status ? std::optional(status->st_mode) : std::nullopt;
}

/// Returns the inode number of the object at `path` (of a link itself, not of its target). Stays
/// the same when the object is renamed. Returns nothing if nothing is there.
/// Throws: as `status_of_name`.
inline std::optional<ino_t> inode_of_name(const std::string& path) {
  const auto status = status_of_name(path);
  return status ? std::optional(status->st_ino) : std::nullopt;
}

/// Whether the open file `fd` is the object at `path` (not what a link there points to). False if
/// nothing is there. Throws: as `status_of_name`.
inline bool is_still_at(int fd, const std::string& path) {
  struct stat opened {};
  const auto named = status_of_name(path);
  return named && ::fstat(fd, &opened) == 0 && opened.st_dev == named->st_dev &&
         opened.st_ino == named->st_ino;
}

/// Returns the path at which `FileSystem::exchange` keeps one of the two objects for a moment if
/// the file system cannot exchange in one step. For a staging path and its destination, in any
/// order, this is `DST.partial.old`, and the object is the replaced checkpoint.
inline std::string path_in_exchange(const std::string& a, const std::string& b) {
  return std::max(a, b) + ".old";
}

/// Returns the size of a file and the time of its last change, in words. Two changes give the same
/// text if the size stays and the file system's clock does not move on between them.
inline std::string state_in_words(const struct stat& status) {
  char text[96];
  std::snprintf(text, sizeof text, "%lld bytes, changed at %lld.%09ld",
                static_cast<long long>(status.st_size),
                static_cast<long long>(status.st_mtim.tv_sec), status.st_mtim.tv_nsec);
  return text;
}

/// Throws Error(already_exists) if the destination is a link whose target does not exist.
inline void require_no_dangling_link(const std::string& destination) {
  struct stat status {};
  const auto mode = mode_of_name(destination);
  if (!mode || !S_ISLNK(*mode) || ::stat(destination.c_str(), &status) == 0) return;
  throw Error::expected(ErrorKind::already_exists, {.path = destination}, "destination",
                        "an unused name", "a broken link", "remove or rename it");
}

/// Throws Error(invalid_argument) if the destination is directly in /dev (/dev/shm is allowed), or
/// anywhere in procfs or sysfs (/proc, /sys).
inline void require_storage(const std::string& destination) {
  const std::string parent = directory_of(destination);
  struct stat folder {};
  struct stat devices {};
  struct statfs system {};
  if (::stat(parent.c_str(), &folder) != 0 || ::statfs(parent.c_str(), &system) != 0) return;
  const bool is_of_devices = ::stat("/dev", &devices) == 0 && folder.st_dev == devices.st_dev &&
                             folder.st_ino == devices.st_ino;
  const bool is_of_kernel = system.f_type == PROC_SUPER_MAGIC || system.f_type == SYSFS_MAGIC;
  if (!is_of_devices && !is_of_kernel) return;
  throw Error::expected(ErrorKind::invalid_argument, {.path = destination}, "destination",
                        "a path in a folder that can store files",
                        is_of_devices ? "a path in the folder of devices (/dev)"
                                      : "a path among the kernel's own files (/proc, /sys)");
}

}  // namespace tessera::detail
