#include "formats/staging/staged_destination.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "base/advisory_lock.h"
#include "base/file_descriptor.h"
#include "base/named_object.h"
#include "formats/staging/extra_copies.h"
#include "formats/staging/journal.h"
#include "formats/staging/own_files.h"
#include "formats/staging/shared_work.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

using tessera::detail::FileDescriptor;
using tessera::detail::is_still_at;
using tessera::detail::LockResult;
using tessera::detail::mode_of_name;
using tessera::detail::retry_on_interrupt;
using tessera::detail::throw_system_error;
using tessera::detail::try_lock;

[[noreturn]] void refuse_name(const std::string& path, std::string_view rule,
                              std::string_view found) {
  throw Error(
      ErrorKind::already_exists, {.path = path},
      std::string(rule) +
          ": expected an unused name, which is needed while the checkpoint is written, found " +
          std::string(found) + " (remove or rename it)");
}

/// Throws if the name of `longest_path`, which is the destination's name with a suffix, is too long
/// for the file system.
void require_short_name(const std::string& destination, const std::string& longest_path) {
  const long max_nbytes = ::pathconf(directory_of(destination).c_str(), _PC_NAME_MAX);
  const std::size_t nbytes = last_component(longest_path).size();
  if (max_nbytes < 0 || nbytes <= static_cast<std::size_t>(max_nbytes)) return;
  const std::size_t name_nbytes = last_component(destination).size();
  const std::size_t behind_nbytes = nbytes - name_nbytes;
  const std::string suffix = longest_path.substr(longest_path.size() - behind_nbytes);
  throw Error::expected(
      ErrorKind::invalid_argument, {.path = destination}, "name of the destination",
      "at most " + std::to_string(static_cast<std::size_t>(max_nbytes) - behind_nbytes) +
          " bytes, as " + suffix + " is added to it while the checkpoint is written",
      std::to_string(name_nbytes));
}

[[noreturn]] void refuse_kept(const std::string& path, const std::string& what,
                              Remedy::Action action) {
  throw Error(ErrorKind::already_exists, {.path = path}, "staging: " + what, {action});
}

/// Throws if a directory that is to be removed holds an entry outside `names` and `is_extra`.
void require_no_foreign_entry(const FileSystem& fs, const std::string& path, FileNames names,
                              const std::string& rule, const std::string& why,
                              const std::function<bool(const std::string&)>& is_extra) {
  const auto name = first_foreign_entry(fs, path, names, is_extra);
  if (!name) return;
  throw Error(
      ErrorKind::already_exists, {.path = join_path(path, *name)},
      rule + ": this file does not belong to a checkpoint, and " + why + " (move it elsewhere)");
}

/// Throws the error for files of an earlier writer that cannot be removed. Its message advises to
/// remove them by hand.
[[noreturn]] void refuse_stuck(const std::string& path, std::string_view failure) {
  throw Error(ErrorKind::io, {.path = path},
              "staging: cannot remove what an earlier run left here: " + std::string(failure) +
                  " (remove it yourself)");
}

/// Returns whether a file or directory is at a staging path. Throws if something else is there,
/// such as a link, because no writer makes it.
bool is_staging_object(const std::string& path) {
  const auto mode = mode_of_name(path);
  if (mode && !S_ISREG(*mode) && !S_ISDIR(*mode)) {
    refuse_name(path, "staging", tessera::detail::kind_in_words(*mode));
  }
  return mode.has_value();
}

bool is_empty(const FileSystem& fs, const std::string& path) {
  return fs.kind_of(path) == FileKind::directory ? fs.list_directory(path).empty()
                                                 : fs.open(path)->nbytes() == 0;
}

/// Returns the names of the extra files that the journal of a staging path names.
std::set<std::string> extra_names_of_work(const FileSystem& fs, const std::string& staging_path) {
  return extra_names_in(
      read_journal_head(fs, StagedDestination::journal_path_of(staging_path)).identity);
}

/// Opens the file or folder at `path` without following a link. Opens a file for writing if the
/// caller may: on NFS, only such a file can be locked. Returns an invalid descriptor if that fails:
/// nothing is there, a link is there, the caller has no permission.
FileDescriptor open_object(const std::string& path) {
  const auto open_for = [&](int access) {
    return FileDescriptor(retry_on_interrupt(
        [&] { return ::open(path.c_str(), access | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); }));
  };
  const auto mode = mode_of_name(path);
  if (mode && S_ISREG(*mode)) {
    if (FileDescriptor file = open_for(O_RDWR)) return file;
  }
  return open_for(O_RDONLY);
}

/// Whether a living process holds the lock on the object at the staging path `path`, or on its
/// journal.
bool is_locked_by_another(const std::string& path) {
  const FileDescriptor object = open_object(path);
  if (object && try_lock(object) == LockResult::held_by_another) return true;
  const FileDescriptor journal = open_object(StagedDestination::journal_path_of(path));
  return journal && tessera::detail::try_lock_between_hosts(journal) == LockResult::held_by_another;
}

[[noreturn]] void refuse_living_writer(const std::string& path) {
  throw Error(ErrorKind::already_exists, {.path = path},
              "staging: another process is writing to the same destination (wait for it, or write "
              "elsewhere)");
}

std::optional<Error> failure_of_close(WritableFile& file) {
  try {
    file.close();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

/// Whether the journal of a staging path describes no work: the object beside it may be a replaced
/// checkpoint.
bool is_journal_of_exchange(const FileSystem& fs, const std::string& staging_path) {
  constexpr std::string_view kOnlyLine = StagedDestination::kJournalFirstLine;
  const std::string path = StagedDestination::journal_path_of(staging_path);
  return read_begin(fs, path, kOnlyLine.size() + 1) == kOnlyLine ||
         read_journal_head(fs, path).is_exchange;
}

/// Returns `destination`, after `finish_exchange`.
std::string with_finished_exchange(FileSystem& fs, std::string destination, DestinationKind kind) {
  StagedDestination::finish_exchange(fs, destination, kind);
  return destination;
}

/// Makes the staging file or directory. Returns false if the path exists already. Sets `failure` if
/// the file was made, but closing it failed.
bool make_object(FileSystem& fs, const std::string& path, DestinationKind kind,
                 std::optional<Error>& failure) {
  try {
    if (kind == DestinationKind::directory) {
      fs.make_directory(path);
    } else {
      failure = failure_of_close(*fs.create(path));
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::already_exists) throw;
    return false;
  }
  return true;
}

/// Opens and locks a staging object. Throws if another process holds the lock, or if there are no
/// locks and the object is not new. Returns an empty descriptor if it is no longer at the path.
FileDescriptor lock_object(const std::string& path, bool is_new) {
  FileDescriptor object = open_object(path);
  if (!object) {
    const int error = errno;
    if (error == ENOENT) return {};
    if (!is_new && error == EACCES) refuse_stuck(path, std::generic_category().message(error));
    throw_system_error(error, path, "open");
  }
  const LockResult lock = try_lock(object);
  if (lock == LockResult::held_by_another) refuse_living_writer(path);
  if (lock == LockResult::unavailable && !is_new) {
    throw Error(ErrorKind::already_exists, {.path = path},
                "staging: left by another run; this file system cannot tell whether that run is "
                "still writing (if no run is writing any more, remove this path)");
  }
  return is_still_at(object.get(), path) ? std::move(object) : FileDescriptor();
}

}  // namespace

std::string StagedDestination::staging_path_of(const std::string& destination) {
  return without_trailing_slashes(destination) + std::string(kSuffix);
}

std::string StagedDestination::journal_path_of(const std::string& staging_path) {
  return staging_path + std::string(kJournalSuffix);
}

std::string StagedDestination::old_path_of(const std::string& destination) {
  return tessera::detail::path_in_exchange(staging_path_of(destination),
                                           without_trailing_slashes(destination));
}

bool StagedDestination::is_in_exchange(const FileSystem& fs, const std::string& destination,
                                       DestinationKind kind) {
  const auto mode = mode_of_name(old_path_of(destination));
  if (!mode) return false;
  if (kind == DestinationKind::member_file) return S_ISREG(*mode);
  return (S_ISREG(*mode) || S_ISDIR(*mode)) &&
         is_journal_of_exchange(fs, staging_path_of(destination));
}

void StagedDestination::finish_exchange(FileSystem& fs, const std::string& destination,
                                        DestinationKind kind) {
  if (!is_in_exchange(fs, destination, kind)) return;
  const std::string path = without_trailing_slashes(destination);
  const std::string old_path = old_path_of(path);
  const std::string staging_path = staging_path_of(path);
  const FileDescriptor object = open_object(old_path);
  const LockResult lock = object ? try_lock(object) : LockResult::unavailable;
  if (lock == LockResult::held_by_another || is_locked_by_another(staging_path)) {
    refuse_living_writer(old_path);
  }
  if (lock == LockResult::unavailable) {
    throw Error(ErrorKind::already_exists, {.path = old_path},
                "staging: the old checkpoint, left by another run while it replaced it; this file "
                "system cannot tell whether that run is still writing (if no run is writing any "
                "more, rename it)");
  }
  if (!mode_of_name(path)) {
    fs.rename(old_path, path);
  } else if (!mode_of_name(staging_path)) {
    fs.rename(old_path, staging_path);
  } else {
    throw Error::expected(ErrorKind::already_exists, {.path = old_path}, "staging",
                          "no " + printable(last_component(path)) +
                              " beside the old checkpoint of an interrupted run",
                          "one that was made later", "move one of them elsewhere");
  }
  fs.sync_directory(directory_of(path));
}

StagedDestination::StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                                     OverwritePolicy overwrite, NothingStaged)
    : fs_(fs),
      destination_(without_trailing_slashes(std::move(destination))),
      staging_path_(staging_path_of(destination_)),
      kind_(kind),
      overwrite_(overwrite) {
  const std::string name = last_component(destination_);
  if (name.empty() || name == "." || name == "..") {
    throw Error::expected(ErrorKind::invalid_argument, {.path = destination_}, "destination",
                          "a path that ends in a name", "'" + destination_ + "'");
  }
  if (const std::string parent = directory_of(destination_);
      fs_.kind_of(parent) != FileKind::directory) {
    throw Error::expected(ErrorKind::io, {.path = destination_}, "destination",
                          "an existing folder to write into", "none at " + printable(parent));
  }
  require_short_name(destination_,
                     kind_ == DestinationKind::member_file ? staging_path_ : journal_path());
  tessera::detail::require_storage(destination_);
  tessera::detail::require_no_dangling_link(destination_);
  if (overwrite_ == OverwritePolicy::refuse && fs_.kind_of(destination_)) {
    throw Error(ErrorKind::already_exists, {.path = destination_},
                "destination exists (OverwritePolicy::replace replaces a checkpoint)");
  }
  if (overwrite_ == OverwritePolicy::replace) {
    const auto mode = mode_of_name(old_path_of(destination_));
    if (mode && !is_in_exchange(fs_, destination_, kind_)) {
      refuse_name(old_path_of(destination_), "staging", tessera::detail::kind_in_words(*mode));
    }
    replaced_files_ = file_states_at(fs_, destination_);
  }
  had_foreign_entry_ =
      fs_.kind_of(destination_) == FileKind::directory &&
      first_foreign_entry(fs_, destination_, FileNames::of_one_checkpoint).has_value();
}

StagedDestination::StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                                     OverwritePolicy overwrite, const Judge& judge)
    : StagedDestination(fs, with_finished_exchange(fs, std::move(destination), kind), kind,
                        overwrite, NothingStaged()) {
  stage(judge);
}

void StagedDestination::check(FileSystem& fs, std::string destination, DestinationKind kind,
                              OverwritePolicy overwrite, const Judge& judge) {
  StagedDestination looked_at(fs, std::move(destination), kind, overwrite, NothingStaged());
  looked_at.has_journal();  // throws if something else has the journal's name
  if (!is_staging_object(looked_at.staging_path_)) return;
  looked_at.lock_fd_ = lock_object(looked_at.staging_path_, false).release();
  if (looked_at.lock_fd_ >= 0 && looked_at.lock_journal()) looked_at.judge_left_over(judge);
}

/// Makes the staging path, or takes over the one that a dead process left.
///
/// [Note: Staging lock] The lock is on the staging object itself, so it leaves no lock file and
/// moves with a rename. After locking, a writer checks that the object is still at the staging
/// path: its last owner may have removed or renamed it in between. The journal is locked too; see
/// [Note: Hosts]. It is locked before anything at the staging path is changed, and is not created
/// beside an object that another program may have made.
void StagedDestination::stage(const Judge& judge) {
  static constexpr int kMaxAttempts = 100;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    std::optional<Error> failure;  // from closing the new object, which is then removed
    const bool is_new = make_object(fs_, staging_path_, kind_, failure);
    if (!is_new && !is_staging_object(staging_path_)) continue;
    FileDescriptor object = lock_object(staging_path_, is_new);
    if (!object) {
      if (failure) throw *failure;
      continue;
    }
    lock_fd_ = object.release();
    try {
      if (failure) throw *failure;
      const bool may_create = is_new || is_empty(fs_, staging_path_);
      const bool is_new_journal = may_create && create_journal();
      if (lock_journal() && is_still_at(lock_fd_, staging_path_) &&
          (is_new || empty_or_go_on(judge))) {
        const bool has_old_journal = is_new && !is_new_journal;  // it may list the work of others
        if (has_old_journal && kind_ != DestinationKind::member_file) reset_journal();
        state_ = State::staged;
        return;
      }
    } catch (...) {
      if (is_new) remove_quietly();
      throw;
    }
    ::close(std::exchange(lock_fd_, -1));
    if (journal_lock_fd_ >= 0) ::close(std::exchange(journal_lock_fd_, -1));
  }
  throw Error(ErrorKind::already_exists, {.path = staging_path_},
              "staging: other processes keep creating this path (try again later)");
}

/// Says whether the object at the staging path was left by a writer that died; see [Note: Left
/// over]. Requires: no living writer has locked it.
bool StagedDestination::is_left_over() const {
  if (kind_ == DestinationKind::member_file) return fs_.kind_of(staging_path_) == FileKind::regular;
  return has_journal() || is_empty(fs_, staging_path_);
}

/// Throws if the directory that a dead process left has an entry which Tessera may not remove.
void StagedDestination::require_only_removable_entries() const {
  const JournalHead head = read_journal_head(fs_, journal_path());
  const std::set<std::string> extra_names = extra_names_in(head.identity);
  // If the journal describes no work, the directory may be a replaced checkpoint, whose files
  // anybody may have written.
  const bool is_work = is_work_in_progress(fs_, staging_path_) && !head.is_exchange;
  require_no_foreign_entry(
      fs_, staging_path_, is_work ? FileNames::of_our_writers : FileNames::of_one_checkpoint,
      "staging", "would be removed with the unfinished work", [&](const std::string& name) {
        if (is_work) return extra_names.contains(name);
        const bool is_nowhere_else = !mode_of_name(join_path(destination_, name));
        return (head.is_exchange && is_nowhere_else && extra_names.contains(name)) ||
               is_equal_at_both_paths(name);
      });
}

/// Decides whether to resume or remove the work that a dead process left; throws if neither is
/// allowed.
StagedDestination::LeftOver StagedDestination::judge_left_over(const Judge& judge) const {
  const bool is_directory = fs_.kind_of(staging_path_) == FileKind::directory;
  const bool is_other_kind = is_directory != (kind_ == DestinationKind::directory);
  const std::string found = is_directory ? "a directory" : "a file";
  LeftOver verdict = LeftOver::foreign;
  const bool is_shared = SharedWork(fs_, destination_).is_begun();
  if (is_left_over()) {
    const bool is_needed = is_shared || has_kept_work();
    verdict = judge ? judge(*this) : is_needed ? LeftOver::kept : LeftOver::remove;
  }
  if (verdict == LeftOver::foreign) {
    refuse_name(staging_path_, "staging",
                kind_ == DestinationKind::member_file ? found : found + " without a journal");
  }
  if (verdict == LeftOver::kept && is_shared) {
    refuse_kept(staging_path_, "several workers write this checkpoint, or were interrupted",
                Remedy::Action::discard);
  }
  if (verdict == LeftOver::kept || (verdict == LeftOver::go_on && is_other_kind)) {
    if (is_other_kind) {
      refuse_kept(staging_path_,
                  "an interrupted ckpt-reshard run to another format left its work here: " + found +
                      ", but this run writes " + (is_directory ? "a file" : "a directory"),
                  Remedy::Action::discard);
    }
    refuse_kept(staging_path_, "the work of an interrupted ckpt-reshard run is kept here",
                Remedy::Action::resume_or_discard);
  }
  if (verdict == LeftOver::remove && is_directory) {
    require_only_removable_entries();
  }
  return verdict;
}

/// Resumes the work that a dead process left, or removes it. Returns whether the staging path still
/// exists.
bool StagedDestination::empty_or_go_on(const Judge& judge) {
  if (judge_left_over(judge) == LeftOver::go_on) {
    has_left_over_ = true;
    is_kept_ = true;
    return true;
  }
  try {
    return empty();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io) throw;
    refuse_stuck(staging_path_, error.what());
  }
}

/// Removes the work that a dead process left. Returns whether the staging path still exists.
bool StagedDestination::empty() {
  const bool is_directory =
      kind_ == DestinationKind::directory && fs_.kind_of(staging_path_) == FileKind::directory;
  if (is_directory) {  // first the extra files, which only the journal identifies
    for (const std::string& name : extra_names_of_work(fs_, staging_path_)) {
      fs_.remove_all(join_path(staging_path_, name));
    }
  }
  if (kind_ != DestinationKind::member_file) reset_journal();
  if (is_directory) {
    for (const std::string& left_over : fs_.list_directory(staging_path_)) {
      fs_.remove_all(join_path(staging_path_, left_over));
    }
    return true;
  }
  fs_.remove_all(staging_path_);  // under its lock; the next attempt of `stage` makes it
  return false;
}

/// Says whether there is a journal, complete or cut short. Throws if something else has its name.
bool StagedDestination::has_journal() const {
  if (kind_ == DestinationKind::member_file) return false;
  const auto mode = mode_of_name(journal_path());
  if (!mode) return false;
  // Refuse a link, even a dangling one: its target may be a journal on an unmounted disk.
  if (!S_ISREG(*mode))
    refuse_name(journal_path(), "journal", tessera::detail::kind_in_words(*mode));
  const std::string begin = read_begin(fs_, journal_path(), kJournalMagic.size()).value_or("");
  if (!kJournalMagic.starts_with(begin)) refuse_name(journal_path(), "journal", "another file");
  return true;
}

/// Creates a journal that records nothing, unless a journal, or another object, has its name.
/// Returns whether it did.
bool StagedDestination::create_journal() {
  if (kind_ == DestinationKind::member_file || mode_of_name(journal_path())) return false;
  std::unique_ptr<WritableFile> file;
  try {
    file = fs_.create(journal_path());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::already_exists) throw;
    return false;
  }
  try {
    file->write_at(0, std::as_bytes(std::span(kJournalFirstLine)));
    file->close();
  } catch (const Error&) {
    fs_.remove_all(journal_path());
    throw;
  }
  return true;
}

/// Opens and locks the journal, if there is one. Throws if a process on any host has locked it.
/// Returns false if another process has removed it in between. If the file system has no such
/// locks, the lock on the staged object must do.
bool StagedDestination::lock_journal() {
  if (kind_ == DestinationKind::member_file) return true;
  const auto mode = mode_of_name(journal_path());
  if (!mode || !S_ISREG(*mode)) return true;  // the caller refuses another object
  FileDescriptor file = open_object(journal_path());
  if (!file) return !mode_of_name(journal_path());
  if (tessera::detail::try_lock_between_hosts(file) == LockResult::held_by_another) {
    refuse_living_writer(staging_path_);
  }
  if (!is_still_at(file.get(), journal_path())) return false;
  journal_lock_fd_ = file.release();
  return true;
}

/// Whether this object has opened the journal. If not, the journal may be another writer's.
bool StagedDestination::owns_journal() const {
  return journal_lock_fd_ >= 0 && has_journal();
}

void StagedDestination::reset_journal() {
  const bool is_there = has_journal();
  // Overwrites an existing journal in place, because the staging path must never be without a
  // journal.
  const auto file = is_there ? fs_.open_for_update(journal_path()) : fs_.create(journal_path());
  file->write_at(0, std::as_bytes(std::span(kJournalFirstLine)));
  if (is_there) file->resize(kJournalFirstLine.size());
  file->close();
}

void StagedDestination::reset_journal_for_exchange() {
  const JournalHead head = read_journal_head(fs_, journal_path());
  // Shared work is known by its identity until the exchange.
  const bool is_shared = SharedWork(fs_, destination_).is_begun();
  if (extra_names_.empty() && !is_shared) return reset_journal();
  // If the process dies at any point here, the journal names the extra files, and describes no kept
  // work.
  const std::string line = exchange_line();
  const std::uint64_t offset = head.identity_end_nbytes;
  const auto file = fs_.open_for_update(journal_path());
  file->resize(offset);
  file->write_at(offset, std::as_bytes(std::span(line)));
  file->close();
}

bool StagedDestination::is_work_in_progress(const FileSystem& fs, const std::string& path) {
  const auto has_journal = [&](const std::string& staging_path) {
    if (!staging_path.ends_with(kSuffix)) return false;
    const auto begin = read_begin(fs, journal_path_of(staging_path), kJournalFirstLine.size() + 1);
    return begin && begin->size() > kJournalFirstLine.size() && begin->starts_with(kJournalMagic);
  };
  if (has_journal(without_trailing_slashes(path))) return true;
  // Resolves links, so that `DST.partial/.` and a link to `DST.partial` count too. A pipe, such as
  // a shell's /dev/fd/63, has no resolved path.
  const auto kind = fs.kind_of(path);
  return kind && kind != FileKind::other && has_journal(fs.resolve_links(path));
}

bool StagedDestination::is_being_written(const FileSystem& fs, const std::string& path) {
  return is_locked_by_another(fs.kind_of(path) ? fs.resolve_links(path) : path);
}

std::optional<std::string> StagedDestination::left_over_at(const FileSystem& fs,
                                                           const std::string& destination) {
  std::string path = staging_path_of(destination);
  if (!mode_of_name(path)) return std::nullopt;
  if (!is_journal_of_exchange(fs, path) || is_locked_by_another(path)) return std::nullopt;
  return path;
}

void StagedDestination::remove_left_over(FileSystem& fs, const std::string& destination) {
  finish_exchange(fs, destination, DestinationKind::directory);
  const auto mode = mode_of_name(staging_path_of(destination));
  if (!mode) return;
  // Takes over the staging path. If this is destroyed without commit, it removes the path.
  const StagedDestination staged(
      fs, destination, S_ISDIR(*mode) ? DestinationKind::directory : DestinationKind::file,
      OverwritePolicy::replace, [](const StagedDestination&) { return LeftOver::remove; });
}

bool StagedDestination::has_kept_work() const {
  constexpr std::size_t kReadNbytes = std::size_t{64} << 10;
  constexpr int kNumLinesBefore = 2;  // the first line, and the identity of the work
  if (!has_journal() || read_journal_head(fs_, journal_path()).is_exchange) return false;
  const auto file = fs_.open(journal_path());
  std::string text;
  std::ptrdiff_t num_lines = 0;
  for (std::uint64_t offset = 0; offset < file->nbytes(); offset += text.size()) {
    text.resize(std::min<std::uint64_t>(kReadNbytes, file->nbytes() - offset));
    file->read_at(offset, std::as_writable_bytes(std::span(text)));
    num_lines += std::ranges::count(text, '\n');
    if (num_lines > kNumLinesBefore) return true;
  }
  return false;
}

/// Removes the files that writers made at the staging path, and then the journal. Other files stay.
/// Without a journal beside them, Tessera never removes them.
void StagedDestination::remove_quietly() noexcept {
  try {
    // An exchange in steps has failed on its way: the next writer finishes or undoes it.
    if (overwrite_ == OverwritePolicy::replace && is_in_exchange(fs_, destination_, kind_)) return;
    if (is_still_at(lock_fd_, staging_path_)) {
      remove_own_files();
      const bool has_other_files =
          kind_ == DestinationKind::directory && !fs_.list_directory(staging_path_).empty();
      if (!has_other_files) fs_.remove_all(staging_path_);
    }
    if (owns_journal()) fs_.remove_all(journal_path());
  } catch (...) {
    // Ignored: the next writer removes what is left.
  }
}

/// Whether the writer made an entry of the staging directory: a file, or a folder that holds only
/// files of the writer.
bool StagedDestination::is_own_entry(const std::string& name) const {
  const std::string path = join_path(staging_path_, name);
  if (file_names_ && is_plain_folder(path)) {
    if (!has_file_in(*file_names_, name)) return false;
    return std::ranges::all_of(list_files_within(fs_, path), [&](const std::string& file) {
      return file_names_->contains(join_path(name, file)) && is_plain_file(join_path(path, file));
    });
  }
  const bool is_named = extra_names_.contains(name) || (file_names_ && file_names_->contains(name));
  if (is_named) return is_plain_file(path);
  return !file_names_ && is_file_of_our_writers(fs_, staging_path_, name);
}

/// Throws if the staging directory holds a file that the writer did not make: publishing would make
/// it part of the checkpoint.
void StagedDestination::require_own_entries() const {
  if (kind_ != DestinationKind::directory) return;
  for (const std::string& name : fs_.list_directory(staging_path_)) {
    if (is_own_entry(name)) continue;
    throw Error(ErrorKind::already_exists, {.path = join_path(staging_path_, name)},
                "staging: this file does not belong to the checkpoint, but would become part of it "
                "(move it elsewhere)");
  }
}

/// Removes the files that the writer made in a directory.
void StagedDestination::remove_own_files() {
  if (kind_ != DestinationKind::directory) return;
  for (const std::string& name : fs_.list_directory(staging_path_)) {
    if (is_own_entry(name)) fs_.remove_all(join_path(staging_path_, name));
  }
}

std::optional<std::string> StagedDestination::first_foreign_entry_in_work(
    const FileSystem& fs, const std::string& staging_path) {
  const std::set<std::string> extra_names = extra_names_of_work(fs, staging_path);
  return first_foreign_entry(fs, staging_path, FileNames::of_our_writers,
                             [&](const std::string& name) { return extra_names.contains(name); });
}

/// Whether a file of this name is in the destination and in the staging directory, with the same
/// bytes.
bool StagedDestination::is_equal_at_both_paths(const std::string& name) const {
  return have_equal_bytes(fs_, join_path(staging_path_, name), join_path(destination_, name));
}

/// Throws if publishing would remove a file that is new or changed since the constructor ran, or
/// belongs to no checkpoint (accepted if the constructor saw one and there are no extra files).
/// Accepts an extra file that the new checkpoint has too, with the same bytes.
void StagedDestination::require_replaceable() const {
  const bool is_directory = fs_.kind_of(destination_) == FileKind::directory;
  if (is_directory && (!had_foreign_entry_ || !extra_names_.empty())) require_no_foreign_files();
  require_file_states(fs_, destination_, replaced_files_, [&](const std::string& file) {
    const std::string name = last_component(file);
    return is_directory && file == join_path(destination_, name) && extra_names_.contains(name) &&
           is_equal_at_both_paths(name);
  });
}

void StagedDestination::require_no_foreign_files() const {
  require_no_foreign_entry(fs_, destination_, FileNames::of_one_checkpoint, "destination",
                           "would be removed with the replaced checkpoint",
                           [&](const std::string& name) {
                             return extra_names_.contains(name) && is_equal_at_both_paths(name);
                           });
}

StagedDestination::~StagedDestination() {
  try {
    if (state_ == State::appeared) fs_.rename(destination_, staging_path_);
    // In this order, an exchange in steps moves the old checkpoint aside.
    if (state_ == State::replaced) fs_.exchange(destination_, staging_path_);
    if (state_ != State::none && state_ != State::committed && !is_kept_) remove_quietly();
  } catch (...) {
    // Ignored: the next writer removes what is left at the staging path.
  }
  if (journal_lock_fd_ >= 0) ::close(journal_lock_fd_);
  if (replaced_lock_fd_ >= 0) ::close(replaced_lock_fd_);
  if (lock_fd_ >= 0) ::close(lock_fd_);
}

bool StagedDestination::replaces() const {
  return overwrite_ == OverwritePolicy::replace && fs_.kind_of(destination_).has_value();
}

void StagedDestination::publish() {
  TESSERA_CHECK(state_ == State::staged);
  require_own_entries();
  if (kind_ == DestinationKind::directory) fs_.sync_directory(staging_path_);
  if (!replaces()) {
    fs_.rename(staging_path_, destination_);
    state_ = State::appeared;
  } else {
    require_replaceable();
    // After the exchange, the replaced checkpoint is at the staging path until it is removed. Lock
    // it, so that no other writer takes it over.
    FileDescriptor replaced = open_object(destination_);
    if (replaced) try_lock(replaced);
    replaced_lock_fd_ = replaced.release();
    fs_.exchange(staging_path_, destination_);
    state_ = State::replaced;
  }
  fs_.sync_directory(directory_of(destination_));
}

void StagedDestination::commit() {
  if (state_ == State::staged) publish();
  // The new checkpoint is at its destination and durable, so the commit has succeeded even if
  // something fails now.
  const bool has_replaced = std::exchange(state_, State::committed) == State::replaced;
  try {
    if (has_replaced) fs_.remove_all(staging_path_);
    const bool is_taken = mode_of_name(staging_path_).has_value();  // the next writer is using it
    if (!is_taken && has_journal()) fs_.remove_all(journal_path());
  } catch (const Error&) {
    // Ignored: the next writer removes what is left.
  }
}

}  // namespace tessera::formats
