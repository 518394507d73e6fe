#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "formats/staging/file_states.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {

/// A destination that appears complete or not at all.
///
/// The writer works at `staging_path()`, the sibling `<destination>.partial`. The constructor makes
/// it (an empty directory, or an empty file to be opened with `open_for_update`) and holds an
/// advisory lock on it. `commit()` syncs the directory (each file was synced by its writer),
/// renames it to the destination (exchanges the two if the destination exists), and syncs the
/// parent folder. If this object is destroyed without a successful `commit()`, the destination is
/// as it was before, and the destructor removes the staging path, unless `keep` was called. From a
/// staging directory it removes only files that have names of a writer's files; with others in it,
/// the directory stays, but without a journal.
///
/// [Note: Left over] While a staging path holds anything, a journal is beside it: the file
/// `<destination>.partial.journal`. The journal shows that a writer of Tessera made the staging
/// path. If that writer's process has died, the next writer takes the staging path over: it removes
/// the unfinished work, or resumes it if the caller wants that. An object at a staging path without
/// a journal is never removed, unless it is empty. Callers that keep unfinished work record the
/// finished blocks in the journal; a caller without journals then gets an error. A journal of one
/// line records nothing: the object beside it may also be a replaced checkpoint. A file that is one
/// of several of a checkpoint (member_file) has no journal: its name says that a writer made it.
///
/// [Note: Extra files] Extra files (create.h) may have any name, so the journal names them. A
/// writer that removes unfinished work also removes the extra files that its journal names. A
/// replaced checkpoint may hold extra files: an extra file is removed with it if the new checkpoint
/// has a file of this name with the same bytes. Just before an exchange, the journal gets a line
/// that says so: from then on, the staging path may hold the work or the replaced checkpoint.
///
/// [Note: Files of others] Other programs may change files while a writer works. Just before the
/// destination appears, `publish` checks two things. Files at the destination must be as they were
/// when the writer started, because they are removed with the replaced checkpoint. The staging
/// directory must hold only the writer's files, because all of it becomes the destination. If a
/// check fails, nothing is replaced, and no file of another program is removed.
///
/// [Note: Exchange in steps] Some file systems, such as NFS, cannot exchange two names in one step.
/// There the replaced checkpoint is at `<destination>.partial.old` for a moment. If the process
/// dies then, the next writer finishes or undoes the exchange, before it looks at anything else.
///
/// [Note: Hosts] On NFS, the lock on a directory excludes only processes on the same host. So a
/// writer also locks the journal, with a lock that the server knows.
///
/// Not thread-safe; the writer alone uses the files inside.
class StagedDestination {
 public:
  static constexpr std::string_view kSuffix = ".partial";
  static constexpr std::string_view kJournalSuffix = ".journal";         // after the staging path
  static constexpr std::string_view kJournalMagic = "tessera-journal ";  // of all versions
  static constexpr std::string_view kJournalFirstLine =
      "tessera-journal 1\n";  // with its line feed

  /// What to do with the work that a dead process left at the staging path.
  enum class LeftOver {
    remove,   // remove it, begin new work
    go_on,    // resume it, and keep it if this run does not commit
    kept,     // throw: another run may resume it
    foreign,  // throw: no writer made it
  };
  /// Decides what to do with a staging path that exists already.
  using Judge = std::function<LeftOver(const StagedDestination&)>;

  /// Returns the staging path of a destination. Ignores trailing slashes.
  static std::string staging_path_of(const std::string& destination);
  /// Returns the path of the journal of a staging path.
  static std::string journal_path_of(const std::string& staging_path);

  /// Returns the path at which the replaced checkpoint of a destination is for a moment; see [Note:
  /// Exchange in steps].
  static std::string old_path_of(const std::string& destination);
  /// Finishes or undoes an exchange in steps in which a writer died: puts the replaced checkpoint
  /// to its destination if that is free, or else to the staging path, as after an exchange. Does
  /// nothing if nothing is there.
  /// Throws: Error(already_exists) if the writer may be living, or if both paths are in use.
  static void finish_exchange(FileSystem& fs, const std::string& destination, DestinationKind kind);
  /// Whether `finish_exchange` would do something, or throw.
  static bool is_in_exchange(const FileSystem& fs, const std::string& destination,
                             DestinationKind kind);

  /// Whether `path`, or the target of a link at `path`, is a staging path whose journal has more
  /// than its first line: it describes unfinished work, or says that an exchange began.
  static bool is_work_in_progress(const FileSystem& fs, const std::string& path);
  /// Whether a living process has locked the staging path `path`, or the target of a link at
  /// `path`.
  static bool is_being_written(const FileSystem& fs, const std::string& path);

  /// Returns the staging path if a replaced checkpoint is left there; else nothing (also if a
  /// process has locked it). Requires: `destination` has replaced another checkpoint.
  static std::optional<std::string> left_over_at(const FileSystem& fs,
                                                 const std::string& destination);
  /// Removes what is at the staging path, and its journal. Does nothing if nothing is at the
  /// staging path. Throws: Error(already_exists) if another process writes there, or if there is an
  /// object or a file that Tessera may not remove; Error(io).
  static void remove_left_over(FileSystem& fs, const std::string& destination);

  /// Ignores trailing slashes of `destination`. Its parent directory must exist. If a dead process
  /// left something, calls `judge` under the lock to decide about it. Without `judge`, throws for
  /// kept work and removes anything else that a writer left. Throws: Error(already_exists) if the
  /// destination exists and `overwrite` is `refuse`, if the destination is a dangling link, if
  /// another living process holds the staging path, or if Tessera may not remove the object there
  /// or with the journal's name; what `judge` throws; Error(io); Error(invalid_argument) for a bad
  /// name. After these errors, nothing has changed.
  StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, const Judge& judge = {});
  /// Throws the errors that the constructor would throw, and changes nothing.
  static void check(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, const Judge& judge = {});
  ~StagedDestination();
  StagedDestination(const StagedDestination&) = delete;
  StagedDestination& operator=(const StagedDestination&) = delete;

  const std::string& destination() const { return destination_; }
  const std::string& staging_path() const { return staging_path_; }
  std::string journal_path() const { return journal_path_of(staging_path_); }
  /// Whether there is a journal that records finished blocks.
  bool has_kept_work() const;

  /// Returns the first name in the work at `staging_path` that no writer made and that the journal
  /// does not list as an extra file; nothing if there is no such name.
  static std::optional<std::string> first_foreign_entry_in_work(const FileSystem& fs,
                                                                const std::string& staging_path);

  /// Whether this writer resumes the work that a dead process left.
  bool has_left_over() const { return has_left_over_; }
  /// Writes a journal without identity and blocks (over an existing one).
  void reset_journal();
  /// Call it before `publish` exchanges two checkpoints. Removes the blocks from the journal. With
  /// extra files or in shared work, the journal keeps its identity, which names these files and the
  /// work, and says that an exchange begins.
  void reset_journal_for_exchange();
  /// Sets the names of the extra files that the caller copies into the staging directory. Requires:
  /// the journal names them already. `publish` then throws if it would remove a file that belongs
  /// to no checkpoint, unless it equals the extra file of the same name.
  void set_extra_names(std::set<std::string> names) { extra_names_ = std::move(names); }
  /// Keeps the staging path and the journal if this object is destroyed without commit.
  void keep() noexcept { is_kept_ = true; }
  /// Sets the names (relative paths) of the files that the caller writes into the staging
  /// directory, without extra files. If a file there has another name, `publish` throws and keeps
  /// it. Without this call, `publish` accepts every name that a writer of Tessera gives to a file.
  void set_file_names(std::set<std::string> names) { file_names_ = std::move(names); }
  /// Whether `publish` would replace something.
  bool replaces() const;

  /// Makes the destination appear durably, and keeps a replaced checkpoint at the staging path. If
  /// `commit` does not follow, the destructor undoes this. Used for two destinations that must
  /// appear together. Throws: Error(already_exists) for [Note: Files of others]; Error(io).
  void publish();
  /// Calls `publish` if it has not been called yet, and then removes the replaced checkpoint.
  void commit();

 private:
  struct NothingStaged {};
  /// Makes no staging path. Throws if the destination cannot be written to.
  StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, NothingStaged);

  void stage(const Judge& judge);
  bool create_journal();
  bool lock_journal();
  bool owns_journal() const;
  bool is_left_over() const;
  LeftOver judge_left_over(const Judge& judge) const;
  bool empty_or_go_on(const Judge& judge);
  bool empty();
  bool has_journal() const;
  void require_only_removable_entries() const;
  bool is_equal_at_both_paths(const std::string& name) const;
  void require_replaceable() const;
  void require_no_foreign_files() const;
  bool is_own_entry(const std::string& name) const;
  void require_own_entries() const;
  void remove_own_files();
  void remove_quietly() noexcept;

  FileSystem& fs_;
  std::string destination_;
  std::string staging_path_;
  DestinationKind kind_;
  OverwritePolicy overwrite_;
  int lock_fd_ = -1;           // lock on the staged object, before and after its rename
  int replaced_lock_fd_ = -1;  // lock on the replaced object, at the staging path
  int journal_lock_fd_ = -1;   // lock on the journal, which also excludes other hosts
  bool has_left_over_ = false;
  bool is_kept_ = false;
  bool had_foreign_entry_ = false;  // at the destination, when this was constructed
  FileStates replaced_files_;       // at the destination, when this was constructed
  std::set<std::string> extra_names_;
  std::optional<std::set<std::string>> file_names_;
  enum class State { none, staged, appeared, replaced, committed } state_ = State::none;
};

}  // namespace tessera::formats
