#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::test {

/// Wraps another file system, counts every operation (calls on open files included), and fails the
/// one it is told to with Error(io). The failed operation has no effect, but a failed close closes,
/// and a short write has written half.
/// Syncs are counted and recorded but not done: they cost most of a test's time, and what they win
/// no test can see. Thread-safe like the file system that it wraps.
class FaultFileSystem final : public FileSystem {
 public:
  enum class Fault {
    once,          // a passing error
    from_then_on,  // a disk that is full or gone
    short_write,   // once; where it is a write, its first half is done
  };

  /// Paths in the transcript are shown relative to `root`.
  FaultFileSystem(FileSystem& base, std::string root);

  /// Starts counting at zero and fails operation `index`. A negative index fails none.
  void fail_operation(std::int64_t index, Fault fault = Fault::once);

  std::int64_t num_operations() const;
  bool has_failed() const;
  std::uint64_t num_bytes_read() const { return num_bytes_read_; }  // since it was made

  /// Returns what changed the disk, one line per operation in order, with failures marked:
  /// `create a.partial`, `write a.partial [0, 8)`, `sync a.partial`, `rename a.partial a`.
  std::string transcript() const;

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::unique_ptr<WritableFile> create(const std::string& path) override;
  std::unique_ptr<WritableFile> open_for_update(const std::string& path) override;
  void make_directory(const std::string& path) override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override;
  void rename(const std::string& from, const std::string& to) override;
  void exchange(const std::string& a, const std::string& b) override;
  void remove_all(const std::string& path) override;
  void sync_directory(const std::string& path) override;

 private:
  class FaultReadableFile;
  class FaultWritableFile;

  void count_read(const std::string& path) const;
  void count_change(const std::string& path, const std::string& line);
  bool is_next_to_fail() const;
  Fault fault() const;
  std::string shown(const std::string& path) const;

  FileSystem& base_;
  std::string root_;
  mutable std::mutex mutex_;
  std::int64_t failing_index_ = -1;
  Fault fault_ = Fault::once;
  mutable std::int64_t num_operations_ = 0;
  mutable bool has_failed_ = false;
  mutable std::atomic<std::uint64_t> num_bytes_read_ = 0;
  std::string transcript_;
};

}  // namespace tessera::test
