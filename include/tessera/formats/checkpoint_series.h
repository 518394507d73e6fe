#pragma once

#include <string>
#include <vector>

#include "tessera/base/file_system.h"

// Checkpoints of one run beside each other in one directory, of any format: directories, or single
// files. The newest is the last in the natural order of names, in which runs of digits compare as
// numbers (step-1000 after step-999). Time stamps are never asked: a copy changes them. Hidden
// names and `lost+found` are never looked at.
namespace tessera::formats {

/// A checkpoint that `latest_valid` could not take.
struct SkippedCheckpoint {
  std::string path;
  std::string why;  // in one line
};

/// What `latest_valid` has found.
struct LatestValid {
  std::string path;                          // empty: none found
  std::vector<SkippedCheckpoint> skipped{};  // newer than the one found, newest first
};

/// How much is asked of a checkpoint before it is trusted.
enum class Validation {
  structure,  // it opens, and each file that it names is there, has its size and belongs to it
  checksums,  // and every stored byte is as it was written, where the format can tell
};

/// Returns the newest checkpoint of a directory that is valid. Torn and damaged ones are skipped
/// and told, and so are what a save or a removal left unfinished, links in a loop, and what this
/// process has no permission to open; what is no checkpoint is passed over silently. A directory
/// that does not exist has none. Throws: Error(io): what a failing disk does not give is not taken
/// for damaged, as an older one would then be resumed from.
LatestValid latest_valid(const FileSystem& fs, const std::string& directory,
                         Validation validation = Validation::structure);

/// Removes the checkpoints that are older than the `num_kept` newest valid ones (by
/// Validation::structure), and returns their paths, newest first. Invalid ones do not count, and go
/// when they are older than those kept. Never touched: what does not open as a checkpoint, links,
/// what this process has no permission to open, directories with directories in them, and a save's
/// work in progress.
///
/// Before anything of a checkpoint is deleted it is renamed to `<name>.removing`, so that none is
/// ever half there under its name; what a call that died left under such names, the next one
/// removes. Requires: `num_kept >= 1`; no other process writes into or removes from the directory
/// (DirectoryLock).
/// Throws: Error(invalid_argument); Error(io).
/// `newest`: a name in the directory that stays and counts as the newest; then only names that
/// differ from it in their last number alone are looked at (`step-900` beside `step-1000`), and
/// none where it has no number. Empty: all names.
std::vector<std::string> keep_last(FileSystem& fs, const std::string& directory, int num_kept,
                                   const std::string& newest = {});

/// Makes its holder the only writer of a directory: an advisory lock on the directory itself, which
/// leaves no file behind and ends with the process. Where the file system has no locks, it holds
/// nothing. Not thread-safe.
class DirectoryLock {
 public:
  /// Throws: Error(already_exists) where another living process, or another holder in this one, has
  /// it; Error(not_found); Error(io).
  explicit DirectoryLock(const std::string& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace tessera::formats
