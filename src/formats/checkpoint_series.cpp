#include "tessera/formats/checkpoint_series.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/advisory_lock.h"
#include "base/file_descriptor.h"
#include "base/forwarding_file_system.h"
#include "base/outside_failure.h"
#include "formats/index_names.h"
#include "formats/staging/own_files.h"
#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "object_store/stored_objects.h"
#include "object_store/url.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kRemovingSuffix = ".removing";

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Returns the digits of the number at position `at`, without leading zeros, and moves `at` past
/// the number.
std::string_view take_number(std::string_view text, std::size_t& at) {
  while (at < text.size() && text[at] == '0') ++at;
  const std::size_t begin = at;
  while (at < text.size() && is_digit(text[at])) ++at;
  return text.substr(begin, at - begin);
}

/// Whether `a` is before `b` in the natural order of names, in which digits compare as numbers
/// (`step-9` before `step-10`). Names that differ only in leading zeros are ordered by their bytes.
bool natural_less(std::string_view a, std::string_view b) {
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const std::string_view x = take_number(a, i);
      const std::string_view y = take_number(b, j);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      const auto x = static_cast<unsigned char>(a[i++]);
      const auto y = static_cast<unsigned char>(b[j++]);
      if (x != y) return x < y;
    }
  }
  const std::size_t num_left_in_a = a.size() - i;
  const std::size_t num_left_in_b = b.size() - j;
  return num_left_in_a != num_left_in_b ? num_left_in_a < num_left_in_b : a < b;
}

std::vector<std::string> names_newest_first(const FileSystem& fs, const std::string& directory) {
  std::vector<std::string> names = fs.list_directory(directory);
  const std::string journal_suffix =
      StagedDestination::journal_path_of(StagedDestination::staging_path_of(""));
  std::erase_if(names, [&](const std::string& name) {
    // File systems keep `lost+found` for themselves; it is often not readable.
    return name.starts_with('.') || name == "lost+found" || name.ends_with(journal_suffix);
  });
  std::ranges::sort(names, [](const auto& a, const auto& b) { return natural_less(b, a); });
  return names;
}

/// Whether `name` is a staging path, or an old checkpoint that a save was replacing when it died.
bool is_unfinished(const std::string& name) {
  return name.ends_with(StagedDestination::kSuffix) ||
         name.ends_with(StagedDestination::old_path_of(""));
}

/// Whether the system refuses to open `path` because of a loop of links, or missing permission. (A
/// failing disk reports other errors.)
bool is_closed(const FileSystem& fs, const std::string& path) {
  const auto is_refused = [&](int mode) {
    return ::faccessat(AT_FDCWD, path.c_str(), mode, AT_EACCESS) != 0 &&
           (errno == EACCES || errno == ELOOP);
  };
  return is_refused(R_OK) || (fs.kind_of(path) == FileKind::directory && is_refused(X_OK));
}

/// Whether a path holds a checkpoint, and whether the checkpoint is valid.
struct Examined {
  enum class State { none, invalid, valid } state = State::none;
  bool is_open = false;  // it opened as a checkpoint, perhaps an invalid one
  std::string why{};     // why it is invalid
};

/// Returns the first error of a reader's check, or an empty text. An I/O error is thrown instead.
template <class Check>
std::string first_error(const Check& check) {
  std::mutex mutex;
  std::optional<Finding> first;
  check([&](const Finding& finding) {
    const std::scoped_lock lock(mutex);
    if (finding.severity == Finding::Severity::error && !first) first = finding;
  });
  if (!first) return {};
  const ErrorKind kind = first->rule == "io" ? ErrorKind::io : ErrorKind::corruption;
  const Error error =
      Error::expected(kind, first->where, first->rule, first->expected, first->found);
  if (kind == ErrorKind::io) throw error;
  return error.what();
}

Examined examine(const FileSystem& fs, const std::string& path, Validation validation) {
  using State = Examined::State;
  if (is_closed(fs, path)) {
    return {
        .state = State::invalid,
        .is_open = false,
        .why = "expected a directory that can be opened, found a loop of links, or no permission"};
  }
  std::unique_ptr<CheckpointReader> reader;
  bool has_format = false;
  try {
    detect_format(fs, path);
    has_format = true;
    reader = open_checkpoint(fs, path);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    if (!has_format && error.kind() != ErrorKind::corruption) return {};
    return {.state = State::invalid, .is_open = false, .why = error.what()};
  }
  std::string why = first_error([&](const FindingSink& sink) { reader->check_files(sink); });
  if (why.empty() && validation == Validation::checksums) {
    why = first_error([&](const FindingSink& sink) { reader->verify(sink, [](std::uint64_t) {}); });
  }
  return {
      .state = why.empty() ? State::valid : State::invalid, .is_open = true, .why = std::move(why)};
}

/// Says whether the entry `name` is a file or a directory. Returns false for a link, and if this
/// process may not open the entry.
bool may_be_removed(const FileSystem& fs, const std::string& directory, const std::string& name) {
  const std::string path = join_path(directory, name);
  if (is_closed(fs, path)) return false;
  const auto kind = fs.kind_of(path);
  if (!kind || kind == FileKind::other) return false;
  return fs.resolve_links(path) == join_path(fs.resolve_links(directory), name);
}

/// Returns the first directory inside the directory `path`. Returns nothing if `path` is a file.
/// Such a directory may be a user's, so `keep_last` neither removes nor counts the checkpoint.
std::optional<std::string> first_directory_in(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::directory) return std::nullopt;
  for (std::string& entry : fs.list_directory(path)) {
    if (fs.kind_of(join_path(path, entry)) == FileKind::directory) return std::move(entry);
  }
  return std::nullopt;
}

/// Returns an entry of a folder that is no file of the checkpoint, so that removing the folder
/// would remove this entry too.
std::optional<std::string> foreign_entry_in(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::directory) return std::nullopt;
  return first_foreign_entry(fs, path, FileNames::of_one_checkpoint);
}

/// Deletes a checkpoint that was renamed from `path` to `path` + kRemovingSuffix.
void delete_renamed(FileSystem& fs, const std::string& path) {
  // If a new checkpoint has been written at `path`, the side files belong to it and stay.
  if (!fs.kind_of(path)) {
    for (const FormatDriver* driver : format_drivers()) {
      if (driver->side_files() != nullptr) driver->side_files()->remove_orphans(fs, path);
    }
  }
  fs.remove_all(path + std::string(kRemovingSuffix));
}

/// Removes a checkpoint from an object store: first its index, so that a half-removed checkpoint
/// never looks like a whole one. If its files can be read without the index, marks the folder
/// meanwhile.
void remove_from_store(const FileSystem& fs, const std::string& path) {
  for (const FormatDriver* driver : format_drivers()) {
    if (driver->side_files() == nullptr) continue;
    const auto beside = driver->side_files()->named_by(fs, path);
    if (!beside) continue;
    object_store::remove_objects(path, object_store::list_objects(path),
                                 [](const std::string&) { return true; });
    object_store::remove_objects(*beside, object_store::list_objects(*beside),
                                 [](const std::string&) { return true; });
  }
  object_store::StoredObjects objects = object_store::list_objects(path);
  // Lists show only the folder if there is an object of the same name: the object was not examined.
  if (objects.size() > 1) objects.erase("");
  const bool was_marked = object_store::take_incomplete_mark(objects);
  const auto name_of = [](const auto& object) { return object.first; };
  const bool may_look_whole = std::ranges::none_of(objects, is_index_name, name_of) ||
                              std::ranges::any_of(objects, may_be_whole_without_index, name_of);
  const bool is_marked = was_marked || (objects.size() > 1 && may_look_whole);
  if (is_marked && !was_marked) object_store::mark_incomplete(path);
  object_store::remove_objects(path, objects, is_index_name);
  object_store::remove_objects(path, objects,
                               [](const std::string& name) { return !is_index_name(name); });
  if (is_marked) object_store::remove_incomplete_mark(path);
  object_store::forget(path);
}

/// Removes the side files of a checkpoint whose removal from an object store was interrupted: the
/// checkpoint itself, which is removed first, is gone.
void remove_orphans_from_store(FileSystem& fs, const std::string& path) {
  class Files final : public ForwardingFileSystem {
   public:
    using ForwardingFileSystem::ForwardingFileSystem;
    void remove_all(const std::string& side_file) override {
      object_store::remove_objects(side_file, object_store::list_objects(side_file),
                                   [](const std::string&) { return true; });
    }
  };
  Files files(fs);
  for (const FormatDriver* driver : format_drivers()) {
    if (driver->side_files() != nullptr) driver->side_files()->remove_orphans(files, path);
  }
}

/// Whether a folder holds only files that Tessera's writers make, and has no index or is marked as
/// incomplete. On an object store, an interrupted save or removal leaves such a folder.
bool is_left_on_store(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::directory) return false;
  const std::vector<std::string> names = fs.list_directory(path);
  const bool is_marked = std::ranges::find(names, object_store::kIncompleteMark) != names.end();
  return !names.empty() && (is_marked || std::ranges::none_of(names, is_index_name)) &&
         !first_foreign_entry(fs, path, FileNames::of_our_writers);
}

}  // namespace

LatestValid latest_valid(const FileSystem& fs, const std::string& directory,
                         Validation validation) {
  LatestValid latest;
  if (!fs.kind_of(directory)) return latest;
  for (const std::string& name : names_newest_first(fs, directory)) {
    const std::string path = join_path(directory, name);
    if (is_unfinished(name)) {
      latest.skipped.push_back({path, "an unfinished save"});
      continue;
    }
    if (name.ends_with(kRemovingSuffix)) {
      latest.skipped.push_back({path, "an unfinished removal"});
      continue;
    }
    Examined found = examine(fs, path, validation);
    if (found.state == Examined::State::valid) {
      latest.path = path;
      break;
    }
    if (found.state == Examined::State::invalid) {
      latest.skipped.push_back({path, std::move(found.why)});
    }
  }
  return latest;
}

LatestValid latest_valid(const std::string& directory, Validation validation) {
  object_store::forget(directory);
  return latest_valid(object_store::files(), directory, validation);
}

namespace {

/// A name cut at its last number: `step-` and `.pt` for `step-900.pt`. Empty if the name has no
/// number.
struct Numbered {
  explicit Numbered(const std::string& name) {
    constexpr const char* kDigits = "0123456789";
    const std::size_t last = name.find_last_of(kDigits);
    if (last == std::string::npos) return;
    const std::size_t before = name.find_last_not_of(kDigits, last);
    const std::size_t first = before == std::string::npos ? 0 : before + 1;
    around_number = {name.substr(0, first), name.substr(last + 1)};
  }
  std::optional<std::pair<std::string, std::string>> around_number;  // before and after the number
};

}  // namespace

std::vector<std::string> keep_last(FileSystem& fs, const std::string& directory, int num_kept,
                                   const std::string& newest, const LeftCheckpointSink& left) {
  if (num_kept < 1) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, "keep_last",
                          "at least 1 checkpoint to keep", std::to_string(num_kept));
  }
  std::vector<std::string> removed;
  const Numbered series(newest);
  const auto is_of_series = [&](const std::string& name) {
    if (newest.empty()) return true;
    const bool is_removing = name.ends_with(kRemovingSuffix);
    const Numbered other(is_removing ? name.substr(0, name.size() - kRemovingSuffix.size()) : name);
    return name != newest && series.around_number && other.around_number == series.around_number;
  };
  // For a name that begins with that of a checkpoint of the series, returns the rest.
  const auto rest_of = [&](const std::string& name) -> std::string {
    const Numbered other(name);
    if (!series.around_number || !other.around_number) return {};
    const auto& [front, end] = *series.around_number;
    const auto& [its_front, its_end] = *other.around_number;
    return its_front == front && its_end.starts_with(end) ? its_end.substr(end.size()) : "";
  };
  const bool is_on_store = object_store::is_url(directory);
  int num_valid = newest.empty() ? 0 : 1;
  // On an object store: paths of removed checkpoints that may have left files beside them.
  std::set<std::string> gone;
  const std::vector<std::string> names = names_newest_first(fs, directory);
  for (const std::string& name : names) {
    if (const std::string rest = rest_of(name);
        is_on_store && num_valid == num_kept && !rest.empty()) {
      const std::string before = name.substr(0, name.size() - rest.size());
      if (std::ranges::find(names, before) == names.end()) {
        gone.insert(join_path(directory, before));
      }
    }
    if (!is_of_series(name)) continue;
    const std::string path = join_path(directory, name);
    if (is_unfinished(name) || !may_be_removed(fs, directory, name)) {
      continue;
    }
    const auto folder = first_directory_in(fs, path);
    if (folder && (num_valid < num_kept || !left || name.ends_with(kRemovingSuffix))) continue;
    if (name.ends_with(kRemovingSuffix)) {
      delete_renamed(fs, path.substr(0, path.size() - kRemovingSuffix.size()));
      continue;
    }
    const Examined found = examine(fs, path, Validation::structure);
    if (num_valid == num_kept) {
      const auto foreign = folder ? folder : foreign_entry_in(fs, path);
      if (found.is_open && foreign && left) left(path, *foreign);
      const bool is_checkpoint = found.is_open && !foreign;
      const bool is_left_over = is_on_store && !folder && is_left_on_store(fs, path);
      if (is_checkpoint || is_left_over) removed.push_back(path);
    } else if (found.state == Examined::State::valid) {
      ++num_valid;
    }
  }
  for (const std::string& path : gone) remove_orphans_from_store(fs, path);
  if (removed.empty()) return removed;
  if (is_on_store) {
    for (const std::string& path : removed) remove_from_store(fs, path);
    return removed;
  }
  for (const std::string& path : removed) fs.rename(path, path + std::string(kRemovingSuffix));
  fs.sync_directory(directory);
  for (const std::string& path : removed) delete_renamed(fs, path);
  return removed;
}

DirectoryLock::DirectoryLock(const std::string& directory) {
  auto object = tessera::detail::open_file(directory, O_RDONLY | O_DIRECTORY);
  if (tessera::detail::try_lock(object) == tessera::detail::LockResult::held_by_another) {
    throw Error(
        ErrorKind::already_exists, {.path = directory},
        "another writer has locked this directory: another job, or another TrainState or save "
        "of this job (wait until it ends, or save to another directory)");
  }
  fd_ = object.release();
}

DirectoryLock::~DirectoryLock() {
  ::close(fd_);
}

}  // namespace tessera::formats
