#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "formats/staging/journal.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"

namespace tessera::formats {

// [Note: Shared work] Several processes can write one checkpoint together, each one a share of the
// blocks. They need no messages, only a directory that all of them see. Beside the staging path is
// the folder `<destination>.partial.shares`:
//
//     lock           is locked by a process that begins or finishes the work
//     work           the identity of the work, which must be equal in all processes
//     command        a text of the process that began the work
//     exchange       the inode number of the new checkpoint, once it is about to swap paths with
//                    the one that it replaces
//     share-I        the journal of share I
//     share-I.lock   is locked by the process that writes share I, and names that process
//     share-I.done   says "complete" once share I is complete and synced
//     base-I         only with a base: which pieces of share I equal pieces of the base
//     base-I.lock    is locked by the process that compares this share
//
// The first process makes the staging path, the main journal beside it (a single writer has only
// this one), and then `work`. The identities in these two have one random token: if another writer
// has taken the staging path since, its journal lacks the token. Each process writes the blocks of
// its share into the files at the staging path, and records them in the journal of its share. When
// all shares are complete, one process takes over the blocks that these journals list, without
// reading them, and commits as a single writer does. It removes the folder of shared work after the
// checkpoint has appeared. If it dies in between, this folder stays, and the staging path is gone,
// or is the replaced checkpoint: then its inode number is not that in `exchange`, or its journal
// lacks the token. If it dies before the two swap paths, the next process that finishes the work
// makes the new checkpoint appear.
//
// The locks are byte-range locks, which NFS has too. On a file system without locks, every share is
// refused.

/// The folder of shared work of one destination. Thread-safe: all its state is in files.
class SharedWork {
 public:
  SharedWork(FileSystem& fs, const std::string& destination);

  const std::string& path() const { return path_; }
  /// Whether there is shared work that is neither finished nor discarded. If so, the staging path
  /// holds this work, not a replaced checkpoint.
  bool is_begun() const;
  /// Whether `path` is, or links to, the staging path of shared work that has begun.
  static bool is_begun_at(const FileSystem& fs, const std::string& path);
  /// Returns an identity for new work: that of the move, and a random token by which `is_begun`
  /// knows the work again. The main journal and `begin` need the same one.
  static ResumeIdentity with_new_token(ResumeIdentity identity);
  /// Returns the identity of the work, without the token. Requires: is_begun().
  ResumeIdentity identity() const;
  /// Returns the number of shares of the work. Requires: is_begun().
  int num_shares() const;
  /// Returns the `command` that `begin` has stored. Requires: is_begun().
  std::string command() const;

  /// Throws Error(already_exists) if `path()` is a file, a link, a folder of another user, or a
  /// folder with other files. Does nothing if it does not exist.
  void require_own() const;
  /// Creates the folder if it is missing, then waits for the lock of the whole work, until `stop`
  /// or CurrentStop asks to end. Throws:
  /// Error(unsupported) if the file system has no locks; Error(io) if the destination has no parent
  /// folder; Error(interrupted); what require_own throws.
  tessera::detail::FileDescriptor lock(const std::stop_token& stop = {});
  /// Removes what earlier work left in the folder, except `lock` and the results of comparisons
  /// with a base: each result says for which move it is valid. Requires: `lock` is held.
  void clear();
  /// Begins the work. Requires: `lock` is held, the staging path exists, and the main journal has
  /// the same identity, synced.
  void begin(const ResumeIdentity& identity, int num_shares, const std::string& command);
  /// Throws Error(mismatch) with the first difference if the work was begun with another identity
  /// or another number of shares.
  void require_same(const ResumeIdentity& identity, int num_shares) const;

  std::string journal_path(int share) const;
  bool is_complete(int share) const;
  /// A share that is not complete.
  struct Incomplete {
    int share = 0;
    std::string state;  // in words
  };
  /// Returns the shares that are not complete, in ascending order. Lists the folder once, and looks
  /// only at files of shares that were begun. Requires: is_begun().
  std::vector<Incomplete> incomplete_shares() const;
  /// Returns why a share is not complete, in words. Requires: is_complete(share) is false.
  std::string state_in_words(int share) const;
  /// Locks a share. Returns nothing if another process has locked it. Throws: Error(unsupported) if
  /// the file system has no locks.
  std::optional<tessera::detail::FileDescriptor> try_lock_share(int share) const;
  /// Writes this process's name into the lock file of a share. Requires: the share is locked.
  void name_holder(int share);
  /// Throws Error(already_exists), which says that another process is writing the share.
  [[noreturn]] void refuse_held(int share) const;
  enum class Mark {
    synced,    // stays after a power failure
    unsynced,  // may be lost then; for a share without blocks, which costs nothing to repeat
  };
  /// Records that a share is complete. Requires: its blocks and its journal are synced.
  void mark_complete(int share, Mark mark = Mark::synced);
  /// Undoes mark_complete. Requires: `lock` is held, and the share is locked.
  void unmark_complete(int share);

  /// Locks a share of the comparison with a base; returns nothing if another process holds it.
  /// Requires: the folder exists.
  std::optional<tessera::detail::FileDescriptor> try_lock_comparison(int share) const;
  /// Returns up to `max_nbytes` of what `write_comparison` wrote for this share; nothing if none.
  std::optional<std::string> read_comparison(int share, std::uint64_t max_nbytes) const;
  /// Throws Error(already_exists) if a process is comparing pieces with a base.
  void refuse_while_compared() const;
  /// Writes the result of a share of the comparison: all of it or nothing. Requires: the share is
  /// locked.
  void write_comparison(int share, const std::string& text);

  /// Returns the finished blocks of all shares, with the identity of the main journal, so that one
  /// process can resume them all. Requires: is_begun().
  JournalContents all_blocks() const;

  /// Records which object is the new checkpoint, just before it and the one that it replaces swap
  /// paths. From then on, the staging path may hold the replaced checkpoint, and no process may
  /// take this for unfinished work. Requires: `lock` is held.
  void begin_exchange();
  /// Undoes `begin_exchange`, if the checkpoints could not swap paths. Ignores failures.
  void undo_exchange() noexcept;
  /// Removes the folder. Requires: `lock` is held.
  void remove();
  /// Removes the folder of finished work, and the replaced checkpoint that a dead worker may have
  /// left at the staging path. Requires: `lock` is held, and is_begun() is false.
  /// Throws: Error(mismatch) if the new checkpoint is neither at the destination nor at the staging
  /// path.
  void clean_up();
  /// Removes what workers of a finished move left in the folder, because the last of them died
  /// before it could, or while it did. Keeps the results of comparisons with a base. Does nothing
  /// if a move has begun that is not finished, if the folder is not this user's own, or if another
  /// process holds the lock: never waits. Every other writer calls this when it has the staging
  /// path.
  /// Requires: this process does not hold `lock`.
  void remove_ended();
  /// Removes the folder and, if work has begun, the staging path. Does nothing without a folder.
  /// Throws: Error(already_exists) if a process is writing a share or compares with a base.
  void discard();

 private:
  std::string path_in(const std::string& name) const { return join_path(path_, name); }
  /// Returns the names in the folder; none if there is no folder, such as when another worker has
  /// just finished the work and removed it.
  std::vector<std::string> names() const;
  std::set<int> named_shares() const;
  bool is_result_missing() const;
  void remove_replaced();
  bool has_done_text(const std::string& name) const;
  std::string comparison_path(int share) const;
  std::optional<tessera::detail::FileDescriptor> try_lock(const std::string& path) const;

  FileSystem& fs_;
  std::string destination_;
  std::string path_;
};

/// A difference between the identities of two runs.
struct IdentityDifference {
  std::string name;
  std::string before;
  std::string now;
};
/// Returns the first difference of two identities; nothing if they are equal. If only a digest
/// differs, returns the first difference in the texts that explain the plan, or, without one, the
/// digest. Ignores these texts if no digest differs.
std::optional<IdentityDifference> first_difference(const ResumeIdentity& before,
                                                   const ResumeIdentity& now);

}  // namespace tessera::formats
