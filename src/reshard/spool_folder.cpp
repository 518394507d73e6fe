#include "reshard/spool_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "base/digest.h"
#include "base/file_descriptor.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::reshard {
namespace {

std::string temporary_folder() {
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

}  // namespace

std::string make_spool_folder(const std::string& parent, const std::string& url) {
  if (const std::string last = last_component(url); last.empty() || last == "." || last == "..") {
    throw Error::expected(ErrorKind::invalid_argument, {.path = url}, "destination",
                          "a URL that ends in a name", "'" + printable(last) + "'");
  }
  char name[64];
  const std::uint64_t digest = xxh3_64(std::as_bytes(std::span(url)));
  std::snprintf(name, sizeof name, "tessera-spool-%u-%016llx", static_cast<unsigned>(::geteuid()),
                static_cast<unsigned long long>(digest));
  const std::string folder = join_path(parent.empty() ? temporary_folder() : parent, name);
  if (::mkdir(folder.c_str(), 0700) == 0) return folder;
  if (errno == ENOENT || errno == ENOTDIR) {
    throw Error::expected(ErrorKind::io, {.path = directory_of(folder)}, "spool",
                          "an existing folder to write into", "none",
                          "create it, or choose another folder");
  }
  if (errno != EEXIST) tessera::detail::throw_system_error(errno, folder, "create");
  struct stat status {};
  if (::lstat(folder.c_str(), &status) != 0) {
    tessera::detail::throw_system_error(errno, folder, "stat");
  }
  if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid()) {
    throw Error::expected(ErrorKind::already_exists, {.path = folder}, "spool",
                          "a folder that belongs to this user", "a file, or another user's folder",
                          "remove it");
  }
  return folder;
}

}  // namespace tessera::reshard
