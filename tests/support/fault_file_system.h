#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::test {

/// Wraps another file system, counts every operation (also calls on open files), and makes one
/// chosen operation throw Error(io). The failed operation has no effect, with two exceptions: a
/// failed close closes the file, and a short write writes the first half.
/// Syncs are counted and recorded, but not executed, because they would take most of a test's time
/// and have no effect that a test can see. As thread-safe as the wrapped file system.
class FaultFileSystem final : public FileSystem {
 public:
  enum class Fault {
    once,          // one operation fails
    from_then_on,  // all later operations fail too, as on a full disk
    short_write,   // once; if it is a write, its first half is written
  };

  /// Paths in the transcript are shown relative to `root`.
  FaultFileSystem(FileSystem& base, std::string root);

  /// Counts operations from zero again, and makes operation number `index` fail. A negative index:
  /// none fails.
  void fail_operation(std::int64_t index, Fault fault = Fault::once);

  std::int64_t num_operations() const;
  bool has_failed() const;
  std::uint64_t num_bytes_read() const { return num_bytes_read_; }  // since the constructor

  /// Returns the operations on files and folders that change them, since the last `fail_operation`,
  /// one a line, failed ones marked: `write a.partial [0, 8)`, `sync a.partial FAILED`.
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
