#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Syncs and closes the files of a checkpoint. A sync takes milliseconds even for a small file, but
/// a file system can do many syncs at the same time. So `add` itself syncs only the first
/// kNumSyncedByCaller files. It passes later files to threads, and returns before they are synced.
///
/// Why not one syncfs(2): it also waits for what other programs have written to this file system,
/// kernels before 5.8 do not report its failures, and file systems on servers may ignore it.
///
/// Thread-safe. If it is destroyed before `wait`, files may be closed without a sync.
class FileSyncs {
 public:
  static constexpr std::size_t kNumSyncedByCaller = 64;

  FileSyncs() = default;
  ~FileSyncs();
  FileSyncs(const FileSyncs&) = delete;
  FileSyncs& operator=(const FileSyncs&) = delete;

  /// Syncs and closes `file`, or passes it to a thread that does so later. Waits while the queue of
  /// files is full. Throws: what the sync or close of this file, or of an earlier one, throws.
  void add(std::unique_ptr<WritableFile> file);
  /// Waits until all added files are synced. Throws: as `add`.
  void wait();

 private:
  void start_threads();
  void run();

  std::mutex mutex_;                  // guards all below
  std::condition_variable has_file_;  // for the threads
  std::condition_variable has_less_;  // for the callers: a file has been synced
  std::deque<std::unique_ptr<WritableFile>> waiting_;
  std::size_t num_added_ = 0;
  std::size_t num_in_work_ = 0;
  bool is_ended_ = false;
  std::exception_ptr failure_;  // the first one
  std::vector<std::thread> threads_;
};

/// Syncs directories: many of them by several threads. Throws: as FileSystem::sync_directory.
void sync_directories(FileSystem& fs, const std::vector<std::string>& paths);

}  // namespace tessera::formats
