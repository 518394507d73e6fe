#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A file open for reading at any offset. Thread-safe: every call states its own offset.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  /// Returns the path that was opened.
  virtual const std::string& path() const = 0;
  /// Returns the size that the file had when it was opened. Units: bytes.
  virtual std::uint64_t nbytes() const = 0;
  /// Fills all of `out` with the bytes of the file that begin at `offset`. Throws:
  /// Error(corruption) naming path and byte range if the file is too short; Error(io) if the
  /// operating system fails.
  virtual void read_at(std::uint64_t offset, std::span<std::byte> out) const = 0;
  /// Returns, as text, the file's size and time of change (on an object store: its ETag) when it
  /// was opened. To notice a change, open the file again and compare the texts. They are equal for
  /// a changed file only if its size and time stayed equal. Empty if nothing is known.
  virtual std::string version() const { return {}; }
};

/// A file open for writing at any offset. Thread-safe for writes that do not overlap.
class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes without sync and hides failures: call close()
  /// Returns the path that was opened.
  virtual const std::string& path() const = 0;
  /// Writes all of `bytes`; the file grows if needed. Throws: Error(io), also if the disk is full.
  virtual void write_at(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  /// Lets large writes at offsets that are multiples of 4096 bypass the page cache, if the file
  /// system can. This saves the copy into the cache and most of the time of `sync`. Call it after
  /// `resize` has reserved the bytes, and only for data that is not read again soon.
  virtual void bypass_cache() {}
  /// Sets the size; new bytes read as zero. Reserves disk blocks if the file system can (on tmpfs:
  /// only checks that there is room), so that a full disk is an Error(io) here, and not later.
  virtual void resize(std::uint64_t nbytes) = 0;
  /// Waits until all written bytes are on the disk. Throws: Error(io).
  virtual void sync() = 0;
  /// Closes the file without sync. Throws: Error(io), also for failures of earlier writes.
  virtual void close() = 0;
};

/// The kind of object at a path; `other`: devices, sockets, pipes.
enum class FileKind { regular, directory, other };

/// An interface to files: those of the operating system (`posix`), of servers, or of tests.
/// Thread-safe. Unless a comment says otherwise, calls throw Error(not_found) if a path is missing,
/// Error(already_exists) if a path to create exists, and Error(io) for other failures.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  /// Returns what `path` is, links followed; nothing if it does not exist or is a broken link.
  virtual std::optional<FileKind> kind_of(const std::string& path) const = 0;
  /// Opens a regular file. Throws Error(not_found) for anything else (directory, device, fifo).
  virtual std::unique_ptr<ReadableFile> open(const std::string& path) const = 0;
  /// Creates a file that must not exist yet.
  virtual std::unique_ptr<WritableFile> create(const std::string& path) = 0;
  /// Opens an existing file for writing. Throws Error(already_exists) for a link or a hard link.
  virtual std::unique_ptr<WritableFile> open_for_update(const std::string& path) = 0;
  virtual void make_directory(const std::string& path) = 0;  // must not exist
  virtual std::vector<std::string> list_directory(
      const std::string& path) const = 0;  // sorted names
  /// Returns the absolute path of the object at `path`, which must exist, with all links followed.
  virtual std::string resolve_links(const std::string& path) const = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;  // `to` must not exist
  /// Swaps two existing paths in one step, so that neither name is ever missing. If the file system
  /// cannot do this, renames in three steps: each name is then missing for a moment.
  virtual void exchange(const std::string& a, const std::string& b) = 0;
  virtual void remove_all(const std::string& path) = 0;  // `path` may be missing; follows no links
  /// Waits until the names in a directory are on the disk, for example after a rename.
  virtual void sync_directory(const std::string& path) = 0;

  /// Returns the operating system's files. Lives as long as the process.
  static FileSystem& posix();
};

/// Returns all bytes of a file. Throws: Error(corruption) if it is larger than `max_nbytes`.
std::string read_file(const FileSystem& fs, const std::string& path, std::uint64_t max_nbytes);
/// Returns the first `max_nbytes` bytes of a file, or the whole file if it is shorter; nothing if
/// there is no regular file at `path`.
std::optional<std::string> read_begin(const FileSystem& fs, const std::string& path,
                                      std::uint64_t max_nbytes);

/// Joins a directory and a name with one slash. Returns `name` alone if `directory` is empty.
std::string join_path(const std::string& directory, const std::string& name);

std::string without_trailing_slashes(std::string path);  // a root stays `/`
/// Returns a path's parent directory; `.` for a name alone, `/` for `/`. Ignores trailing slashes.
std::string directory_of(const std::string& path);
/// Returns the last name of a path. Ignores trailing slashes.
std::string last_component(const std::string& path);

/// Says whether `name`, apart from links, stays inside the directory it is joined to: relative, not
/// empty, no `..` component, no NUL. Called for each path read from a file, before it is opened.
bool is_contained_path(const std::string& name);

/// Throws Error(corruption) if links lead from `directory`/`name`, which must exist, to a place
/// outside `directory`. Requires: `is_contained_path(name)`.
void require_contained(const FileSystem& fs, const std::string& directory, const std::string& name);

/// What a writer makes at its destination.
enum class DestinationKind {
  file,
  directory,
  member_file,  // one file of a checkpoint, such as its index
};
/// What to do with an object at the destination: throw Error(already_exists), or replace it.
enum class OverwritePolicy { refuse, replace };

}  // namespace tessera
