#include "tessera/reshard/store_destination.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/outside_failure.h"
#include "formats/index_names.h"
#include "formats/staging/replaceable.h"
#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "object_store/spool.h"
#include "object_store/stored_objects.h"
#include "reshard/spool_folder.h"
#include "tessera/formats/format_writer.h"

namespace tessera::reshard {
namespace {

using formats::KeptWork;
using formats::StagedDestination;

}  // namespace

namespace {

/// Returns a line about what the server has kept of an interrupted upload; empty if it has nothing.
std::string left_line(const object_store::LeftOnServer& left, const std::string& url) {
  std::string what;
  if (left.num_objects > 0) {
    what = std::to_string(left.num_objects) + (left.num_objects == 1 ? " object" : " objects") +
           " of an incomplete checkpoint";
  }
  if (left.unfinished_nbytes > 0) {
    what += (what.empty() ? "" : ", ") + std::to_string(left.unfinished_nbytes) +
            " bytes of unfinished uploads";
  }
  if (what.empty() && left.has_begun_to_replace) what = "the rest of the old checkpoint";
  return what.empty() ? what : "kept: " + what + " at " + printable(url);
}

/// Returns the rule for the index of a new checkpoint. An extra file such as `voices.index.json`
/// has a name like an index; it must not appear after the index.
std::function<bool(const std::string&)> is_index_unless_extra(
    const std::vector<formats::ExtraFile>& extra_files) {
  std::set<std::string> extra;
  for (const formats::ExtraFile& file : extra_files) extra.insert(file.name);
  return [extra = std::move(extra)](const std::string& name) {
    return formats::is_index_name(name) && !extra.contains(name);
  };
}

}  // namespace

struct StoreDestination::State {
  std::string url;
  std::optional<object_store::Spool> spool;

  /// Returns the URL to which a path in the spool is uploaded; any other path unchanged.
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
  object_store::SpoolOptions spool{
      .url = url,
      .staging_suffix = std::string(StagedDestination::kSuffix),
      .is_index = is_index_unless_extra(options.extra_files),
      .needs_index = formats::needs_index,
      .may_be_whole_without_index = formats::may_be_whole_without_index,
      .resumes = options.kept_work == KeptWork::resume,
      .discards = options.kept_work == KeptWork::discard};
  if (formats::writer_of(options.format).writes_bytes_once()) {
    spool.release = object_store::SpooledFile::Release::after_upload;
  } else {  // HDF5 makes files grow
    spool.min_part_nbytes = object_store::PartSizes::kMinNbytesOfGrowing;
  }
  auto there = object_store::list_objects(url);
  spool.is_marked = object_store::take_incomplete_mark(there);
  object_store::require_one_kind(url, there);
  // `check_replaceable` and `is_interrupted_write` list the objects again, so they check at least
  // those in `there`.
  if (options.overwrite == OverwritePolicy::replace && !there.empty()) {
    formats::check_replaceable(object_store::files(), url, options.overwrite_option,
                               options.extra_files);
    if (spool.is_marked && options.kept_work == KeptWork::refuse) {
      throw Error(ErrorKind::already_exists, {.path = url},
                  "destination: an interrupted run has left this checkpoint incomplete",
                  {Remedy::Action::resume_or_discard});
    }
    spool.replaced = std::move(there);
  } else if (!there.empty() && !spool.resumes) {
    if (!formats::is_interrupted_write(url, options.extra_files)) {
      throw Error(ErrorKind::already_exists, {.path = url},
                  "destination exists (" + options.overwrite_option + " replaces a checkpoint)");
    }
    if (!spool.discards) formats::refuse_interrupted_write(url);
    spool.replaced = std::move(there);
  }
  const std::string folder = make_spool_folder(options.spool, url);
  try {
    state_->spool.emplace(folder, std::move(spool));
  } catch (...) {
    ::rmdir(folder.c_str());  // if it is empty
    throw;
  }
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
  const bool is_passing =
      tessera::detail::is_outside_failure(error) || error.kind() == ErrorKind::already_exists;
  std::string list;
  Remedy remedy = error.remedy();
  if (is_passing) list = left_line(state_->spool->keep(), state_->url);
  if (!list.empty()) {
    remedy = {Remedy::Action::resume_or_discard};
  } else {
    try {
      state_->spool->abort();
    } catch (const Error& failure) {
      list = "not removed: unfinished uploads at " + printable(state_->url) + ": " + failure.what();
      remedy = {Remedy::Action::discard};
    }
  }
  // The further lines of a reason are a list that Error::listing has made.
  const std::string reason(error.reason());
  const std::size_t line_end = std::min(reason.find('\n'), reason.size());
  if (line_end < reason.size())
    list = reason.substr(line_end + 1) + (list.empty() ? "" : "\n") + list;
  if (list.empty()) throw Error(error.kind(), where, reason, remedy);
  throw Error::listing(error.kind(), where, reason.substr(0, line_end), list, remedy);
}

}  // namespace tessera::reshard
