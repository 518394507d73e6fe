#include "reshard/spool_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <system_error>

#include "base/digest.h"
#include "base/file_descriptor.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::reshard {
namespace {

std::string temporary_folder() {
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

/// A process that is still running may write nothing for hours, while it uploads. It holds a lock,
/// but some file systems have no locks.
constexpr std::chrono::hours kMaxIdle{24};

/// Whether nothing in a folder has changed for `kMaxIdle`.
bool is_idle(const std::filesystem::path& folder) {
  using std::filesystem::last_write_time;
  const auto limit = std::filesystem::file_time_type::clock::now() - kMaxIdle;
  if (last_write_time(folder) > limit) return false;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_symlink() && last_write_time(entry) > limit) return false;
  }
  return true;
}

/// Removes the files of a spool, unless a living process writes there.
void remove_spool(const std::filesystem::path& folder) {
  using formats::StagedDestination;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::string path = entry.path();
    if (!path.ends_with(StagedDestination::kSuffix)) continue;
    path.resize(path.size() - StagedDestination::kSuffix.size());
    StagedDestination::remove_left_over(FileSystem::posix(), path);
  }
  ::rmdir(folder.c_str());
}

/// Removes the spools of this user that killed processes left in `parent` a day ago or earlier. The
/// next run to the same URL uses a spool again, but there may be no such run.
void remove_old_spools(const std::string& parent, const std::string& prefix) {
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator(parent, failure)) {
    struct stat status {};
    if (!entry.path().filename().string().starts_with(prefix) ||
        ::lstat(entry.path().c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
        status.st_uid != ::geteuid()) {
      continue;
    }
    try {
      if (is_idle(entry.path())) remove_spool(entry.path());
    } catch (const std::exception&) {
      // Ignored: a later run tries it again.
    }
  }
}

}  // namespace

std::string make_spool_folder(const std::string& parent, const std::string& url) {
  if (const std::string last = last_component(url); last.empty() || last == "." || last == "..") {
    throw Error::expected(ErrorKind::invalid_argument, {.path = url}, "destination",
                          "a URL that ends in a name", "'" + printable(last) + "'");
  }
  char digest[20];
  std::snprintf(digest, sizeof digest, "%016llx",
                static_cast<unsigned long long>(xxh3_64(std::as_bytes(std::span(url)))));
  const std::string prefix = "tessera-spool-" + std::to_string(::geteuid()) + "-";
  const std::string place = parent.empty() ? temporary_folder() : parent;
  remove_old_spools(place, prefix);
  const std::string folder = join_path(place, prefix + digest);
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
