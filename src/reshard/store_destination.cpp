#include "tessera/reshard/store_destination.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string_view>

#include "base/digest.h"
#include "base/file_descriptor.h"
#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "object_store/spool.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"

namespace tessera::reshard {
namespace {

using formats::KeptWork;
using formats::StagedDestination;

constexpr std::string_view kIndexEnd = ".index.json";  // of the index files of Hugging Face

/// Whether a file makes the files beside it a checkpoint, in any format.
bool is_index(const std::string& name) {
  return name.ends_with(kIndexEnd) ||
         std::ranges::any_of(formats::format_drivers(), [&](const auto* driver) {
           return name == driver->description().in_directory;
         });
}

std::string temporary_folder() {
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

/// Makes the folder in which the files for a URL are written. It has the same path in each run, so
/// that a run removes what an interrupted one left. Only this user can use it.
std::string make_spool_folder(const std::string& parent, const std::string& url) {
  char name[64];
  const std::uint64_t digest = xxh3_64(std::as_bytes(std::span(url)));
  std::snprintf(name, sizeof name, "tessera-spool-%u-%016llx", static_cast<unsigned>(::geteuid()),
                static_cast<unsigned long long>(digest));
  const std::string folder = join_path(parent.empty() ? temporary_folder() : parent, name);
  if (::mkdir(folder.c_str(), 0700) == 0) return folder;
  if (errno != EEXIST) tessera::detail::throw_system_error(errno, folder, "create");
  struct stat status {};
  if (::lstat(folder.c_str(), &status) != 0) {
    tessera::detail::throw_system_error(errno, folder, "stat");
  }
  if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid()) {
    throw Error::expected(ErrorKind::already_exists, {.path = folder}, "spool",
                          "a folder of this user", "something else", "remove it");
  }
  return folder;
}

}  // namespace

struct StoreDestination::State {
  std::string url;
  std::optional<object_store::Spool> spool;

  /// Returns the URL for a local path; any other path as it is.
  std::string url_of(const std::string& path) const {
    const std::string& local = spool->path();
    if (!path.starts_with(local)) return path;
    std::string_view rest = std::string_view(path).substr(local.size());
    if (rest.starts_with(StagedDestination::kSuffix)) {
      rest.remove_prefix(StagedDestination::kSuffix.size());
    }
    return url + std::string(rest);
  }
};

StoreDestination::StoreDestination(const std::string& url_given, const StoreOptions& options)
    : state_(new State{.url = without_trailing_slashes(url_given), .spool = {}}) {
  const std::string& url = state_->url;
  object_store::forget(url);
  object_store::SpoolOptions spool{.url = url,
                                   .staging_suffix = std::string(StagedDestination::kSuffix),
                                   .is_index = is_index,
                                   .resumes = options.kept_work == KeptWork::resume,
                                   .discards = options.kept_work == KeptWork::discard};
  if (formats::writer_of(options.format).writes_bytes_once()) {
    spool.release = object_store::SpooledFile::Release::after_upload;
  }
  auto there = object_store::list_objects(url);
  if (options.overwrite == OverwritePolicy::replace && !there.empty()) {
    spool.replaced = std::move(there);
  } else if (!there.empty() && !spool.resumes) {
    throw Error(ErrorKind::already_exists, {.path = url},
                "destination exists (OverwritePolicy::replace replaces a checkpoint)");
  }
  state_->spool.emplace(make_spool_folder(options.spool, url), std::move(spool));
}

StoreDestination::~StoreDestination() = default;

FileSystem& StoreDestination::file_system() {
  return *state_->spool;
}

const std::string& StoreDestination::path() const {
  return state_->spool->path();
}

void StoreDestination::end_after(const Error& error) {
  ErrorWhere where = error.where();
  where.path = state_->url_of(where.path);
  const bool is_passing = error.kind() == ErrorKind::io || error.kind() == ErrorKind::interrupted ||
                          error.kind() == ErrorKind::already_exists;
  std::string list;
  Remedy remedy = error.remedy();
  if (is_passing) {
    const std::uint64_t nbytes = state_->spool->keep();
    if (nbytes > 0) {
      list = "kept: " + std::to_string(nbytes) + " bytes of unfinished uploads at " +
             printable(state_->url);
      remedy = {Remedy::Action::resume_or_discard};
    }
  } else {
    try {
      state_->spool->abort();
    } catch (const Error& failure) {
      list = "not removed: unfinished uploads at " + printable(state_->url) + ": " + failure.what();
      remedy = {Remedy::Action::discard};
    }
  }
  // A reason of several lines comes from Error::listing.
  const std::string reason(error.reason());
  const std::size_t line_end = std::min(reason.find('\n'), reason.size());
  if (line_end < reason.size())
    list = reason.substr(line_end + 1) + (list.empty() ? "" : "\n") + list;
  if (list.empty()) throw Error(error.kind(), where, reason, remedy);
  throw Error::listing(error.kind(), where, reason.substr(0, line_end), list, remedy);
}

}  // namespace tessera::reshard
