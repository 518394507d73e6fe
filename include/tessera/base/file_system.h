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

#include "tessera/base/option_spelling.h"

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

/// Makes a destination appear whole or not at all.
///
/// Work happens at `staging_path()`, the sibling `<destination>.partial`, which is made here (an
/// empty directory, or an empty file to be opened with `open_for_update`) and held with an advisory
/// lock on itself while this object lives. `commit()` syncs the directory (each file was synced by
/// its writer), renames it into place (an exchange where something is replaced), and syncs the
/// parent; where it throws, the destination is what it was before. Destroyed without commit, the
/// staging path is removed, unless it is to be kept, and what stood at the destination is
/// untouched. A directory then loses the files that have a writer's names; if somebody has put
/// others there, it stays with them, and without a journal.
///
/// [Note: Left over] A journal, the file `<destination>.partial.journal`, lies beside a staging
/// path for as long as anything is in it, and so tells that it is a writer's. What a dead process
/// left is taken over and emptied, unless the caller goes on with it; whatever else has the name,
/// unless it is empty, is somebody's and stays. Callers that keep work let the journal tell what is
/// finished: such work is refused unless the caller knows about journals. A journal of one line
/// tells of nothing: what it lies beside may also be a checkpoint that was replaced. Members of a
/// checkpoint have none: there the name is enough. Not thread-safe; the files inside are the
/// writer's own.
class StagedDestination {
 public:
  static constexpr std::string_view kSuffix = ".partial";
  static constexpr std::string_view kJournalSuffix = ".journal";         // behind the staging path
  static constexpr std::string_view kJournalMagic = "tessera-journal ";  // of any version
  static constexpr std::string_view kJournalFirstLine =
      "tessera-journal 1\n";  // with the line feed

  /// What is done about what a dead process left.
  enum class LeftOver {
    remove,
    go_on,    // it stays also where the destination is destroyed without commit
    kept,     // refused as work that another run may go on with
    foreign,  // refused as somebody's
  };
  /// Says what a staging path that is there already is.
  using Judge = std::function<LeftOver(const StagedDestination&)>;

  /// Returns where the work towards a destination lies. Trailing slashes are ignored.
  static std::string staging_path_of(const std::string& destination);
  /// Returns where the journal of the work in a staging path lies.
  static std::string journal_path_of(const std::string& staging_path);

  /// Whether `path` leads to a staging path beside which a journal tells what the work is.
  static bool is_work_in_progress(const FileSystem& fs, const std::string& path);

  /// Returns the staging path of a destination where it holds what a writer was done with and could
  /// not remove; nothing where it holds work, or a writer is at it.
  static std::optional<std::string> left_over_at(const FileSystem& fs,
                                                 const std::string& destination);

  /// Trailing slashes of `destination` are ignored. Its parent must exist. `judge` is asked, under
  /// the lock, about what a dead process left; without it work that is kept is refused, and
  /// anything else removed.
  /// Throws: Error(already_exists) where the destination is in the way and `overwrite` is refuse,
  /// or is a link that leads nowhere, where another living process holds the staging path, or where
  /// what lies there or is named like its journal is refused; what `judge` throws. Then all is left
  /// as it is.
  StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, const Judge& judge = {},
                    OptionSpelling spelling = OptionSpelling::command_line);
  /// Throws what the constructor would, and changes nothing.
  static void check(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, const Judge& judge = {},
                    OptionSpelling spelling = OptionSpelling::command_line);
  ~StagedDestination();
  StagedDestination(const StagedDestination&) = delete;
  StagedDestination& operator=(const StagedDestination&) = delete;

  const std::string& destination() const { return destination_; }
  const std::string& staging_path() const { return staging_path_; }
  std::string journal_path() const { return journal_path_of(staging_path_); }
  /// Whether a journal tells of finished blocks.
  bool has_kept_work() const;

  /// Whether what a dead process left is gone on with.
  bool has_left_over() const { return has_left_over_; }
  /// Makes the journal say of nothing that it is finished.
  void reset_journal();
  /// Leaves staging path and journal where they are when this is destroyed without commit.
  void keep() noexcept { is_kept_ = true; }
  /// Whether `publish` would replace something.
  bool replaces() const;

  /// Makes the destination appear, durably, but keeps what it replaced: destroyed without commit,
  /// the destination is what it was before. For destinations that must appear together.
  void publish();
  /// Publishes, unless that is done, and lets go of what was replaced.
  void commit();

 private:
  struct NothingStaged {};
  /// Throws on a destination that cannot be written to.
  StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, OptionSpelling spelling, NothingStaged);

  void stage(const Judge& judge);
  bool is_left_over() const;
  LeftOver judge_left_over(const Judge& judge) const;
  bool empty_or_go_on(const Judge& judge);
  bool empty();
  bool has_journal() const;
  void remove_own_files();
  void remove_quietly() noexcept;

  FileSystem& fs_;
  std::string destination_;
  std::string staging_path_;
  DestinationKind kind_;
  OverwritePolicy overwrite_;
  OptionSpelling spelling_;    // of options in messages
  int lock_fd_ = -1;           // of what is staged, wherever it stands
  int replaced_lock_fd_ = -1;  // of what it replaced, while that stands at the staging path
  bool has_left_over_ = false;
  bool is_kept_ = false;
  bool had_foreign_entry_ = false;  // what is at the destination
  enum class State { none, staged, appeared, replaced, committed } state_ = State::none;
};

}  // namespace tessera
