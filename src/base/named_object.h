#pragma once

#include <sys/stat.h>

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/error.h"

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

/// Returns the mode of the object at `path`; nothing if nothing is there. Does not follow a link.
inline std::optional<mode_t> mode_of_name(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return status.st_mode;
}

/// Returns the size of a file and the time of its last change, in words. The text differs after a
/// change of the file.
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

}  // namespace tessera::detail
