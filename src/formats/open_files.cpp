#include "formats/open_files.h"

#include <sys/resource.h>

#include <algorithm>

namespace tessera::formats {

std::size_t num_files_kept_open() {
  constexpr rlim_t kLeast = 4;
  constexpr rlim_t kMost = 128;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kLeast;
  return static_cast<std::size_t>(std::clamp(limit.rlim_cur / 8, kLeast, kMost));
}

}  // namespace tessera::formats
