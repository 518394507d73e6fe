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
  /// Returns the path as it was opened.
  virtual const std::string& path() const = 0;
  /// Returns the size when the file was opened. Units: bytes.
  virtual std::uint64_t nbytes() const = 0;
  /// Fills all of `out` from `offset`. Throws: Error(corruption) naming path and byte range where
  /// the file ends before; Error(io) where the operating system fails.
  virtual void read_at(std::uint64_t offset, std::span<std::byte> out) const = 0;
};

/// A new file being written at any offset. Thread-safe for writes that do not overlap.
class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes without sync; failures are lost, so call close()
  /// Returns the path that it was created under.
  virtual const std::string& path() const = 0;
  /// Writes all of `bytes`. Throws: Error(io), for a full disk too.
  virtual void write_at(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  /// Lets large writes at multiples of 4096 go past the page cache where the file system can, which
  /// spares the copy and most of the time of `sync`. For what is not read again soon. The bytes
  /// should have been reserved by `resize`.
  virtual void bypass_cache() {}
  /// Sets the size; new bytes read as zero. Reserves the blocks where the file system can, so that
  /// a full disk shows early.
  virtual void resize(std::uint64_t nbytes) = 0;
  /// Returns when what was written is on the disk.
  virtual void sync() = 0;
  /// Closes the file, without sync. Throws what the system says only now.
  virtual void close() = 0;
};

/// What a path leads to; `other`: devices, sockets, pipes.
enum class FileKind { regular, directory, other };

/// The operating system's files, behind an interface so that tests can make any operation fail.
/// Every call throws Error(not_found) where a path is absent, Error(already_exists), or Error(io)
/// with the path and the system's reason. Thread-safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  /// Returns what `path` is (links followed), or nothing where there is nothing.
  virtual std::optional<FileKind> kind_of(const std::string& path) const = 0;
  /// Opens a regular file; anything else (directory, device, fifo) is Error(not_found).
  virtual std::unique_ptr<ReadableFile> open(const std::string& path) const = 0;
  /// Creates a file that must not exist yet.
  virtual std::unique_ptr<WritableFile> create(const std::string& path) = 0;
  /// Opens an existing file for writing at offsets (after HDF5 has laid it out).
  virtual std::unique_ptr<WritableFile> open_for_update(const std::string& path) = 0;
  virtual void make_directory(const std::string& path) = 0;  // must not exist
  virtual std::vector<std::string> list_directory(
      const std::string& path) const = 0;  // sorted names
  /// Returns the absolute path of the object at `path`, which must exist, with all links followed.
  virtual std::string resolve_links(const std::string& path) const = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;  // `to` must not exist
  /// Swaps two existing paths in one step, so that neither name is ever without an object; where
  /// the file system cannot, renames in two steps.
  virtual void exchange(const std::string& a, const std::string& b) = 0;
  virtual void remove_all(const std::string& path) = 0;  // absent is fine; links are not followed
  /// Returns when the names in a directory are on the disk: after a rename in it, for one.
  virtual void sync_directory(const std::string& path) = 0;

  /// Returns the real one. Lives as long as the process.
  static FileSystem& posix();
};

/// Reads a whole file. Throws: Error(corruption) where it is larger than `max_nbytes`.
std::string read_file(const FileSystem& fs, const std::string& path, std::uint64_t max_nbytes);
/// Reads the first bytes of a file, `max_nbytes` or as many as it has; nothing where `path` is no
/// regular file.
std::optional<std::string> read_begin(const FileSystem& fs, const std::string& path,
                                      std::uint64_t max_nbytes);

/// Joins with one slash. Does not normalise.
std::string join_path(const std::string& directory, const std::string& name);

std::string without_trailing_slashes(std::string path);  // a root stays `/`
/// Returns the directory that a path lies in, `.` where it names none. Trailing slashes are
/// ignored.
std::string directory_of(const std::string& path);
/// Returns the name that a path ends in. Trailing slashes are ignored.
std::string last_component(const std::string& path);

/// Says whether `name` stays inside the directory it is joined to: relative, not empty, no `..`
/// component, no NUL. Every path that comes out of a file passes here before it is opened.
bool is_contained_path(const std::string& name);

/// Throws Error(corruption) unless the existing object at `directory`/`name` lies below `directory`
/// also after all links have been followed. Requires: `is_contained_path(name)`.
void require_contained(const FileSystem& fs, const std::string& directory, const std::string& name);

/// What a destination is to become.
enum class DestinationKind {
  file,
  directory,
  member_file,  // of a checkpoint that is there, or being written
};
/// What becomes of an object that is at the destination already.
enum class OverwritePolicy { refuse, replace };

}  // namespace tessera
