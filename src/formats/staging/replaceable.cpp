#include "formats/staging/replaceable.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/outside_failure.h"
#include "formats/index_names.h"
#include "formats/signatures.h"
#include "formats/staging/extra_copies.h"
#include "formats/staging/own_files.h"
#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "object_store/stored_objects.h"
#include "object_store/url.h"
#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kWayOut = "nothing was removed; if nobody needs it, remove it yourself";

std::string_view found_in_words(std::string_view begin) {
  if (detail::is_hdf5(begin)) return "an HDF5 file that Tessera did not write";
  for (const FormatDriver* driver : format_drivers()) {
    for (const FileMark& mark : driver->file_marks()) {
      if (!mark.signature.empty() && begin.starts_with(mark.signature)) return mark.in_words;
    }
  }
  if (begin.starts_with(detail::kZipSignature)) return "another zip archive";
  return "a file of another kind";
}

std::string begin_of(const FileSystem& fs, const std::string& path) {
  return read_begin(fs, path, FileBegin::kMaxNbytes).value_or("");
}

/// Returns the kind of file that a file with this name must be; null if no format uses the name.
const FileMark* mark_of_name(const std::string& path) {
  for (const FormatDriver* driver : format_drivers()) {
    for (const FileMark& mark : driver->file_marks()) {
      if (path.ends_with(mark.name_end)) return &mark;
    }
  }
  return nullptr;
}

/// Returns the kind of file that a file must be, as its name says, if its first bytes show that it
/// is another one, such as an `index.h5` that is not HDF5. Returns null if they do not. Ignores the
/// suffix of a file that is being written. Accepts an empty file.
const FileMark* missed_mark(const std::string& path, std::string_view begin) {
  if (begin.empty()) return nullptr;
  constexpr std::string_view kSuffix = StagedDestination::kSuffix;
  const FileMark* mark =
      mark_of_name(path.ends_with(kSuffix) ? path.substr(0, path.size() - kSuffix.size()) : path);
  return mark == nullptr || mark->is_at_begin(begin) ? nullptr : mark;
}

bool fits_its_name(const FileSystem& fs, const std::string& path) {
  return missed_mark(path, begin_of(fs, path)) == nullptr;
}

/// Throws if the first bytes of a file do not fit its name.
void require_mark(const FileSystem& fs, const std::string& path, const std::string& option) {
  const std::string begin = begin_of(fs, path);
  const FileMark* mark = missed_mark(path, begin);
  if (mark != nullptr) refuse_to_replace(path, option, mark->in_words, found_in_words(begin));
}

/// Throws if the content of a single file is not of the driver's format. Accepts an empty file.
void require_single_file(const FileSystem& fs, const std::string& path, const FormatDriver& driver,
                         const std::string& option) {
  const std::string begin = begin_of(fs, path);
  if (begin.empty() || driver.is_whole_file(*fs.open(path), begin)) return;
  refuse_to_replace(path, option, driver.description().as_file, found_in_words(begin));
}

/// Throws if a file is one of several files of a checkpoint, because replacing this file alone
/// would damage the checkpoint.
void refuse_one_of_several(const FileSystem& fs, const std::string& path,
                           const std::string& option) {
  for (const FormatDriver* driver : format_drivers()) {
    if (!driver->is_one_of_several(fs, path)) continue;
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option,
                          "a checkpoint to replace", "one file of a sharded checkpoint",
                          "give the path of its directory");
  }
}

/// Throws unless a directory holds only files of one checkpoint, whose first bytes fit their names,
/// and files that are equal to one of `extra_files`.
void require_checkpoint_alone(const FileSystem& fs, const std::string& directory,
                              std::optional<Format> format, const std::string& option,
                              const std::vector<ExtraFile>& extra_files) {
  const auto extra_file = [&](const std::string& name) {
    return std::ranges::find(extra_files, name, &ExtraFile::name);
  };
  const auto is_equal = [&](const std::string& name) {
    const auto file = extra_file(name);
    return file != extra_files.end() && holds_copy(fs, join_path(directory, name), *file);
  };
  if (const auto name =
          first_foreign_entry(fs, directory, FileNames::of_one_checkpoint, is_equal)) {
    if (extra_file(*name) != extra_files.end()) {
      throw Error::expected(ErrorKind::invalid_argument, {.path = join_path(directory, *name)},
                            option, "the bytes that the new checkpoint gets under this name",
                            "other bytes, which would be lost", "move it, or write elsewhere");
    }
    refuse_foreign_file(directory, *name, option);
  }
  std::vector<std::string> names = fs.list_directory(directory);
  std::erase_if(names, [&](const auto& name) { return extra_file(name) != extra_files.end(); });
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    const std::string path = join_path(directory, name);
    if (!is_plain_folder(path)) {
      paths.push_back(path);
      continue;
    }
    for (const std::string& file : list_files_within(fs, path)) {
      paths.push_back(join_path(path, file));
    }
  }
  const int num_threads = object_store::is_url(directory) ? object_store::kNumThreadsForUrls : 1;
  parallel_for(static_cast<std::int64_t>(paths.size()), num_threads, {}, [&](std::int64_t i) {
    require_mark(fs, paths[static_cast<std::size_t>(i)], option);
  });
  if (format) driver_of(*format).require_one_checkpoint(fs, directory, names, option);
}

/// A folder of a universal checkpoint may be complete without an index. `allowed`: it counts as
/// what an interrupted run left. `only_marked`: only if the mark is there.
enum class Folders { allowed, only_marked };

/// Does what is_interrupted_write describes. `folders`: what a folder in `url` counts as.
bool is_left(const std::string& url, const std::vector<ExtraFile>& extra_files, Folders folders) {
  const FileSystem& fs = object_store::files();
  if (fs.kind_of(url) != FileKind::directory) return false;
  const auto is_extra = [&](const std::string& name) {
    const auto file = std::ranges::find(extra_files, name, &ExtraFile::name);
    return file != extra_files.end() && holds_copy(fs, join_path(url, name), *file);
  };
  if (first_foreign_entry(fs, url, FileNames::of_our_writers, is_extra)) return false;
  std::vector<std::string> names = fs.list_directory(url);
  const bool is_marked = std::erase(names, object_store::kIncompleteMark) > 0;
  std::erase_if(names, is_extra);
  const auto is_folder = [&](const std::string& name) {
    return is_plain_folder(join_path(url, name));
  };
  const auto may_be_whole = [&](const std::string& name) {
    if (is_folder(name)) return folders == Folders::only_marked;
    return is_index_name(name) || may_be_whole_without_index(name);
  };
  if (!is_marked && std::ranges::any_of(names, may_be_whole)) return false;
  std::erase_if(names, is_folder);
  std::atomic<bool> all_fit = true;
  parallel_for(static_cast<std::int64_t>(names.size()), object_store::kNumThreadsForUrls, {},
               [&](std::int64_t i) {
                 if (!all_fit) return;
                 const std::string path = join_path(url, names[static_cast<std::size_t>(i)]);
                 if (!fits_its_name(fs, path)) all_fit = false;
               });
  return all_fit;
}

}  // namespace

bool is_interrupted_write(const std::string& url, const std::vector<ExtraFile>& extra_files) {
  return is_left(url, extra_files, Folders::only_marked);
}

void refuse_interrupted_write(const std::string& url) {
  throw Error(
      ErrorKind::already_exists, {.path = url},
      "the destination exists: an interrupted run has left a part of a checkpoint at this URL",
      {Remedy::Action::resume_or_discard});
}

void refuse_to_replace(const std::string& path, const std::string& option,
                       std::string_view expected, std::string_view found) {
  throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option, expected, found,
                        kWayOut);
}

void refuse_foreign_file(const std::string& directory, const std::string& name,
                         const std::string& option) {
  throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, option,
                        "only the files of one checkpoint, because the whole directory is replaced",
                        "'" + printable(name) + "'", "move it, or write elsewhere");
}

void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option) {
  check_replaceable(fs, path, option, {});
}

void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option,
                       const std::vector<ExtraFile>& extra_files) {
  const auto kind = fs.kind_of(path);
  if (!kind || (kind == FileKind::directory && fs.list_directory(path).empty())) return;
  if (object_store::is_url(path) && is_left(path, extra_files, Folders::allowed)) {
    const std::set<std::string> extra = names_of(extra_files);
    const std::vector<std::string> names = fs.list_directory(path);
    if (std::ranges::any_of(names, [&](const auto& name) { return !extra.contains(name); })) return;
  }
  std::optional<Format> format;
  try {
    format = detect_format(fs, path);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    if (error.kind() == ErrorKind::unsupported) {  // a damaged checkpoint is accepted
      throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option,
                            "a checkpoint to replace",
                            kind == FileKind::directory ? "a directory that is no checkpoint"
                                                        : "a file that is no checkpoint",
                            "it was not changed");
    }
  }
  if (kind == FileKind::directory) {
    require_checkpoint_alone(fs, path, format, option, extra_files);
  } else if (format) {
    refuse_one_of_several(fs, path, option);
    require_single_file(fs, path, driver_of(*format), option);
  }
}

}  // namespace tessera::formats
