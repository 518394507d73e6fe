#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

// The checkpoints of one run in one directory, of any format: directories or single files. The
// newest is the last in the natural order of names, in which runs of digits compare as numbers
// (step-1000 after step-999). Time stamps are ignored, because a copy changes them. Hidden names
// and `lost+found` are ignored too.
namespace tessera::formats {

/// A checkpoint that `latest_valid` rejected.
struct SkippedCheckpoint {
  std::string path;
  std::string why;  // in one line
};

/// What `latest_valid` found.
struct LatestValid {
  std::string path;                          // empty: none found
  std::vector<SkippedCheckpoint> skipped{};  // newer than `path`, newest first
};

/// What is checked before a checkpoint is called valid.
enum class Validation {
  structure,  // it opens, and each file it names exists, has the right size and belongs to it
  checksums,  // as `structure`; and every stored byte is unchanged, if the format can tell
};

/// Returns the newest valid checkpoint in a directory. If the directory has none, or does not
/// exist, returns an empty path. `skipped` lists what is newer than the result and was rejected:
/// torn and damaged checkpoints, interrupted saves and removals, links in a loop, and what this
/// process has no permission to open. Ignores what is not a checkpoint. Throws: Error(io). A disk
/// failure does not count as damage, or training would resume from an older checkpoint.
LatestValid latest_valid(const FileSystem& fs, const std::string& directory,
                         Validation validation = Validation::structure);
/// Does the same for a local directory, or for `s3://BUCKET/PREFIX`.
LatestValid latest_valid(const std::string& directory,
                         Validation validation = Validation::structure);

/// Called for an old checkpoint that stays, because its folder contains a file or a folder that is
/// not its own. `foreign_entry`: the path of this entry, relative to the checkpoint.
using LeftCheckpointSink =
    std::function<void(const std::string& path, const std::string& foreign_entry)>;

/// Removes the checkpoints that are older than the `num_kept` newest valid ones (by
/// Validation::structure), and returns their paths, newest first. Invalid checkpoints do not count
/// as kept; if they are older than the kept ones, they are removed too. Never removes: what does
/// not open as a checkpoint, links, what this process has no permission to open, directories that
/// contain a folder or a file that is not of the checkpoint, a save in progress.
///
/// Renames each checkpoint to `<name>.removing` before deleting anything, so that no half-deleted
/// checkpoint ever has the name of a checkpoint. The next call removes what an interrupted call
/// left under such names. An object store cannot rename: there the index is removed first, and the
/// next call removes files that an interrupted call left without an index. `newest`: the name of a
/// checkpoint in the directory, which is kept and counts as the newest. Then considers only names
/// that are equal to `newest` except for the last number (`step-900` for `step-1000`), and no names
/// if `newest` has no number. If `newest` is empty, considers all names.
///
/// `left`, if given, is called for an older checkpoint that stays because of a foreign entry in it.
///
/// Requires: no other process writes into or removes from the directory (DirectoryLock).
/// Throws: Error(invalid_argument) if `num_kept` is below 1; Error(io).
std::vector<std::string> keep_last(FileSystem& fs, const std::string& directory, int num_kept,
                                   const std::string& newest = {},
                                   const LeftCheckpointSink& left = {});

/// A lock that makes its holder the only writer of a directory. The lock is advisory. It is on the
/// directory itself, so it leaves no file behind, and it ends with the process. Does nothing on
/// file systems without locks. Not thread-safe.
class DirectoryLock {
 public:
  /// Throws: Error(already_exists) if another process, or another object in this one, holds the
  /// lock; Error(not_found); Error(io).
  explicit DirectoryLock(const std::string& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace tessera::formats
