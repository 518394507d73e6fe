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
  /// Returns the size and the time of the last change (or the ETag), as they were when the file was
  /// opened, in words. If the file is changed or replaced and opened again, the text differs,
  /// unless the size and the time are equal. Empty if nothing is known.
  virtual std::string version() const { return {}; }
};

/// A file open for writing at any offset. Thread-safe for writes that do not overlap.
class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes without sync and hides failures: call close()
  /// Returns the path that was opened.
  virtual const std::string& path() const = 0;
  /// Writes all of `bytes`. Throws: Error(io), also if the disk is full.
  virtual void write_at(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  /// Lets large writes at offsets that are multiples of 4096 bypass the page cache, if the file
  /// system can. This saves the copy into the cache and most of the time of `sync`. Call it after
  /// `resize` has reserved the bytes, and only for data that is not read again soon.
  virtual void bypass_cache() {}
  /// Sets the size; new bytes read as zero. Reserves the blocks if the file system can (on tmpfs:
  /// only checks that there is room), so that a full disk is noticed early.
  virtual void resize(std::uint64_t nbytes) = 0;
  /// Waits until all written bytes are on the disk.
  virtual void sync() = 0;
  /// Closes the file without sync. Throws: Error(io), also for failures of earlier writes.
  virtual void close() = 0;
};

/// The kind of object at a path; `other`: devices, sockets, pipes.
enum class FileKind { regular, directory, other };

/// An interface to files: those of the operating system (`posix`), of servers, or of tests.
/// Thread-safe. Unless a comment says otherwise, calls throw Error(not_found) if a path is missing,
/// Error(already_exists) if a path to create exists, or Error(io) with the system's reason.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  /// Returns what `path` is (links followed), or nothing if it does not exist.
  virtual std::optional<FileKind> kind_of(const std::string& path) const = 0;
  /// Opens a regular file; anything else (directory, device, fifo) is Error(not_found).
  virtual std::unique_ptr<ReadableFile> open(const std::string& path) const = 0;
  /// Creates a file that must not exist yet.
  virtual std::unique_ptr<WritableFile> create(const std::string& path) = 0;
  /// Opens an existing file to write at offsets; a link or a hard link is Error(already_exists).
  virtual std::unique_ptr<WritableFile> open_for_update(const std::string& path) = 0;
  virtual void make_directory(const std::string& path) = 0;  // must not exist
  virtual std::vector<std::string> list_directory(
      const std::string& path) const = 0;  // sorted names
  /// Returns the absolute path of the object at `path`, which must exist, with all links followed.
  virtual std::string resolve_links(const std::string& path) const = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;  // `to` must not exist
  /// Swaps two existing paths in one step, so that neither name is ever missing. If the file system
  /// cannot do this, renames step by step: then a name is missing for a moment.
  virtual void exchange(const std::string& a, const std::string& b) = 0;
  virtual void remove_all(const std::string& path) = 0;  // `path` may be missing; follows no links
  /// Waits until the names in a directory are on the disk, for example after a rename.
  virtual void sync_directory(const std::string& path) = 0;

  /// Returns the operating system's files. Lives as long as the process.
  static FileSystem& posix();
};

/// Reads a whole file. Throws: Error(corruption) if it is larger than `max_nbytes`.
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

/// Says whether `name` stays inside the directory it is joined to: relative, not empty, no `..`
/// component, no NUL. Every path read from a file is checked here before it is opened.
bool is_contained_path(const std::string& name);

/// Throws Error(corruption) unless the existing object at `directory`/`name` is inside `directory`
/// after all links have been followed. Requires: `is_contained_path(name)`.
void require_contained(const FileSystem& fs, const std::string& directory, const std::string& name);

/// What a writer makes at a destination.
enum class DestinationKind {
  file,
  directory,
  member_file,  // one file of a checkpoint, such as its index
};
/// What to do with an object that is already at the destination.
enum class OverwritePolicy { refuse, replace };

}  // namespace tessera
