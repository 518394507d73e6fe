#pragma once

#include <linux/magic.h>
#include <sys/vfs.h>

#include <string>

namespace tessera::detail {

/// Returns whether the folder at `path` is on NFS; false if statfs fails.
inline bool is_on_nfs(const std::string& path) {
  struct statfs system {};
  return ::statfs(path.c_str(), &system) == 0 && system.f_type == NFS_SUPER_MAGIC;
}

}  // namespace tessera::detail
