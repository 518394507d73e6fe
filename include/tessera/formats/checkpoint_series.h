#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

// The checkpoints of one run in one directory, of any format: directories or single files. The
// newest is the last in the natural order of names, in which runs of digits compare as numbers
// (step-1000 after step-999). Time stamps do not count, because a copy changes them. Entries whose
// names start with a dot, and `lost+found`, are no checkpoints here.
namespace tessera::formats {

/// A checkpoint that `latest_valid` rejected.
struct SkippedCheckpoint {
  std::string path;
  std::string why;  // in one line
};

/// What `latest_valid` found.
struct LatestValid {
  std::string path;                          // of the newest valid checkpoint; empty: none found
  std::vector<SkippedCheckpoint> skipped{};  // rejected, and newer than `path`; newest first
};

/// What `latest_valid` checks before it calls a checkpoint valid.
enum class Validation {
  structure,  // it opens, and each file it names exists, has the right size and belongs to it
  checksums,  // as `structure`; and every stored byte is unchanged, if the format can tell
};

/// Returns the newest valid checkpoint in a directory; an empty path if the directory has none, or
/// does not exist. `skipped` lists what is newer and was rejected: incomplete and damaged
/// checkpoints, interrupted saves and removals, links in a loop, and what this process has no
/// permission to open. Ignores what is not a checkpoint. Throws: Error(io) if a read fails: if that
/// counted as damage, training would resume from an older checkpoint.
LatestValid latest_valid(const FileSystem& fs, const std::string& directory,
                         Validation validation = Validation::structure);
/// The same without a FileSystem: `directory` is a local path or `s3://BUCKET/PREFIX`.
LatestValid latest_valid(const std::string& directory,
                         Validation validation = Validation::structure);

/// Is called for an old checkpoint that `keep_last` leaves, because the checkpoint's folder
/// contains another file or a folder: `foreign_entry`, a path relative to the checkpoint.
using LeftCheckpointSink =
    std::function<void(const std::string& path, const std::string& foreign_entry)>;

/// Keeps the `num_kept` newest valid checkpoints (valid by Validation::structure), removes older
/// ones, and returns the removed paths, newest first. An invalid checkpoint does not count as kept,
/// and is removed if it opens and is older than the kept ones. Never removes: what does not open as
/// a checkpoint, links, what this process has no permission to open, a save in progress, and a
/// directory with a file that is not the checkpoint's. Neither removes nor counts one with folders.
///
/// Renames each checkpoint to `<name>.removing` before deleting anything, so that no half-deleted
/// checkpoint ever has the name of a checkpoint. The next call removes what an interrupted call
/// left under such names. An object store cannot rename: there a call removes the index first, and
/// the next call removes files that an interrupted call left without an index.
///
/// `newest`: empty, or the name of a checkpoint in the directory that is kept and counts as the
/// newest. The call then considers only names that equal `newest` except for the last number
/// (`step-900` for `step-1000`); no names if `newest` has no number. Empty: considers all names.
/// `left`, if given, is called for each older checkpoint that stays because of a foreign entry.
/// Requires: no other process removes from the directory, or replaces a checkpoint in it that this
/// call may remove (DirectoryLock). Others may write new checkpoints.
/// Throws: Error(invalid_argument) if `num_kept` is below 1; Error(not_found) if there is no such
/// directory; Error(io).
std::vector<std::string> keep_last(FileSystem& fs, const std::string& directory, int num_kept,
                                   const std::string& newest = {},
                                   const LeftCheckpointSink& left = {});

/// A lock on a directory, which only one object of all processes can hold at a time. Advisory: it
/// stops only writers that take it too. The lock is on the directory itself, so it leaves no file
/// behind. It ends with the object or the process. No effect on file systems without locks.
class DirectoryLock {
 public:
  /// Takes the lock without waiting. Throws: Error(already_exists) if another process, or another
  /// object in this process, holds it; Error(not_found) if there is no such directory; Error(io).
  explicit DirectoryLock(const std::string& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace tessera::formats
