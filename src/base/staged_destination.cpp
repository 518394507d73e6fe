#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "base/advisory_lock.h"
#include "base/file_descriptor.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera {
namespace {

using detail::FileDescriptor;
using detail::LockResult;
using detail::retry_on_interrupt;
using detail::throw_system_error;
using detail::try_lock;

/// Whether what lies at a staging path may be what a writer left when it was killed. Anything else
/// is somebody's, and stays.
bool may_be_left_over(const FileSystem& fs, const std::string& staging_path, DestinationKind kind) {
  const auto found = fs.kind_of(staging_path);
  if (kind == DestinationKind::file) return found == FileKind::regular;
  if (found != FileKind::directory) return false;
  return std::ranges::all_of(fs.list_directory(staging_path), [&](std::string_view name) {
    if (fs.kind_of(join_path(staging_path, std::string(name))) != FileKind::regular) return false;
    if (name.ends_with(StagedDestination::kSuffix)) {
      name.remove_suffix(StagedDestination::kSuffix.size());
    }
    return std::ranges::any_of(std::array{".h5", ".safetensors", ".json", ".distcp", ".metadata"},
                               [&](std::string_view end) { return name.ends_with(end); });
  });
}

/// Returns the first bytes of the file at `path`, as many as a journal is known by, or those that
/// it has; nothing where there is no file.
std::optional<std::string> begin_of(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::regular) return std::nullopt;
  const auto file = fs.open(path);
  std::string begin(StagedDestination::kJournalMagic.size(), '\0');
  begin.resize(std::min<std::uint64_t>(begin.size(), file->nbytes()));
  file->read_at(0, std::as_writable_bytes(std::span(begin)));
  return begin;
}

/// Removes the journal at `path` of work that is gone. Another file of that name stays.
void remove_journal(FileSystem& fs, const std::string& path) {
  const auto begin = begin_of(fs, path);
  if (begin && StagedDestination::kJournalMagic.starts_with(*begin)) fs.remove_all(path);
}

/// Throws unless `path` is free or a regular file. A link might lead to a journal that is not to be
/// seen now, and what it tells of would be removed.
void require_no_link(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  throw Error(ErrorKind::already_exists, {.path = path},
              "journal: this name is needed for the work in progress, and something else has it "
              "(remove or rename it)");
}

void remove_quietly(FileSystem& fs, const std::string& path) noexcept {
  try {
    fs.remove_all(path);
  } catch (...) {
    // What is left is taken over by the next writer.
  }
}

/// Opens what lies at `path`, without following a link; nothing where it is absent or a link.
FileDescriptor open_object(const std::string& path) {
  return FileDescriptor(retry_on_interrupt(
      [&] { return ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); }));
}

std::optional<Error> failure_of_close(WritableFile& file) {
  try {
    file.close();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

bool is_still_at(const FileDescriptor& object, const std::string& path) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(object.get(), &opened) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

}  // namespace

std::string StagedDestination::staging_path_of(const std::string& destination) {
  return without_trailing_slashes(destination) + std::string(kSuffix);
}

std::string StagedDestination::journal_path_of(const std::string& staging_path) {
  return staging_path + std::string(kJournalSuffix);
}

StagedDestination::StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                                     OverwritePolicy overwrite, const Judge& judge)
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
                          "a folder to be written into", "none at " + printable(parent));
  }
  if (overwrite_ == OverwritePolicy::refuse && fs_.kind_of(destination_)) {
    throw Error(ErrorKind::already_exists, {.path = destination_},
                "destination exists (OverwritePolicy::replace replaces a checkpoint)");
  }

  // [Note: Staging lock] The lock lies on the staging object itself, so no lock file is left behind
  // and it moves along with a rename. Whoever gets the lock looks again whether the object still
  // has that name: its last owner may have removed or renamed it in between.
  static constexpr int kMaxAttempts = 100;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    bool is_new = true;
    std::optional<Error> failure;  // of what was made: it is removed again, under its lock
    try {
      if (kind_ == DestinationKind::directory) {
        fs_.make_directory(staging_path_);
      } else {
        failure = failure_of_close(*fs_.create(staging_path_));
      }
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::already_exists) throw;
      is_new = false;
    }
    FileDescriptor object = open_object(staging_path_);
    if (!object) {
      if (errno == ENOENT) continue;
      throw_system_error(errno, staging_path_, "open");
    }
    const LockResult lock = try_lock(object);
    if (failure && lock == LockResult::held_by_another) throw *failure;
    if (lock == LockResult::held_by_another || (lock == LockResult::unavailable && !is_new)) {
      throw Error(ErrorKind::already_exists, {.path = staging_path_},
                  lock == LockResult::held_by_another
                      ? "staging: another writer is at work on the same destination"
                      : "staging: left over, and this file system cannot tell whether its writer "
                        "lives (remove it if no process writes there)");
    }
    if (!is_still_at(object, staging_path_)) continue;
    lock_fd_ = object.release();
    try {
      if (failure) throw *failure;
      if (is_new) {
        remove_journal(fs_, journal_path());
        return;
      }
      if (judge_left_over(judge) == LeftOver::go_on) {
        has_left_over_ = true;
        is_kept_ = true;
        return;
      }
      remove_journal(fs_, journal_path());
      if (kind_ == DestinationKind::directory &&
          fs_.kind_of(staging_path_) == FileKind::directory) {
        for (const std::string& left_over : fs_.list_directory(staging_path_)) {
          fs_.remove_all(join_path(staging_path_, left_over));
        }
        return;
      }
      // Removed under its lock and made anew in the next round.
      fs_.remove_all(staging_path_);
    } catch (...) {
      if (is_new) remove_quietly(fs_, staging_path_);
      ::close(std::exchange(lock_fd_, -1));
      throw;
    }
    ::close(std::exchange(lock_fd_, -1));
  }
  throw Error(ErrorKind::already_exists, {.path = staging_path_},
              "staging: other processes keep taking it");
}

/// Says whether what a dead process left is gone on with or removed; throws what refuses it.
StagedDestination::LeftOver StagedDestination::judge_left_over(const Judge& judge) const {
  LeftOver verdict = LeftOver::foreign;
  if (may_be_left_over(fs_, staging_path_, kind_)) {
    require_no_link(journal_path());
    verdict = judge ? judge(*this) : has_kept_work() ? LeftOver::kept : LeftOver::remove;
  }
  if (verdict == LeftOver::foreign) {
    throw Error(ErrorKind::already_exists, {.path = staging_path_},
                "staging: this name is needed for the work in progress, and something else has it "
                "(remove or rename it)");
  }
  if (verdict == LeftOver::kept) {
    throw Error(ErrorKind::already_exists, {.path = staging_path_},
                "staging: what an earlier run of ckpt-reshard has finished is kept here (its "
                "--resume goes on with it, its --discard starts from the beginning)");
  }
  return verdict;
}

bool StagedDestination::is_work_in_progress(const FileSystem& fs, const std::string& path) {
  const std::string staging_path = without_trailing_slashes(path);
  return staging_path.ends_with(kSuffix) &&
         begin_of(fs, journal_path_of(staging_path)) == kJournalMagic;
}

bool StagedDestination::has_kept_work() const {
  constexpr std::size_t kReadNbytes = std::size_t{64} << 10;
  constexpr int kNumLinesBefore = 2;  // of the journal itself, and of what the work is
  if (begin_of(fs_, journal_path()) != kJournalMagic) return false;
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

StagedDestination::~StagedDestination() {
  try {
    if (state_ == State::appeared) fs_.rename(destination_, staging_path_);
    if (state_ == State::replaced) fs_.exchange(staging_path_, destination_);
    if (state_ != State::committed && !is_kept_) fs_.remove_all(staging_path_);
  } catch (...) {
    // What is left at the staging path is taken over by the next writer.
  }
  if (replaced_lock_fd_ >= 0) ::close(replaced_lock_fd_);
  if (lock_fd_ >= 0) ::close(lock_fd_);
}

bool StagedDestination::replaces() const {
  return overwrite_ == OverwritePolicy::replace && fs_.kind_of(destination_).has_value();
}

void StagedDestination::publish() {
  TESSERA_CHECK(state_ == State::staged);
  if (kind_ == DestinationKind::directory) fs_.sync_directory(staging_path_);
  if (!replaces()) {
    fs_.rename(staging_path_, destination_);
    state_ = State::appeared;
  } else {
    // What is replaced stands at the staging path until it is removed: lock it, so that no other
    // writer takes that path over in the meantime.
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
  const bool has_replaced = std::exchange(state_, State::committed) == State::replaced;
  if (!has_replaced) return;
  try {
    fs_.remove_all(staging_path_);
  } catch (const Error&) {
    // The new checkpoint stands and is durable, so that this failure is none of the commit's.
  }
}

}  // namespace tessera
