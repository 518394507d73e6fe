#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

namespace tessera::object_store {

/// How many parts are uploaded at the same time. Each is in memory while it is uploaded.
struct UploadLimits {
  static constexpr int kMaxUploads = 8;
  /// This many uploads may always run, whatever the size of the parts.
  static constexpr int kMinUploads = 4;
  /// More than kMinUploads run only if their parts have at most this many bytes in total.
  static constexpr std::uint64_t kMaxNbytes = std::uint64_t{64} << 20;

  /// Returns how many parts of this size are uploaded at the same time.
  static int num_uploads(std::uint64_t part_nbytes) {
    const auto fitting =
        static_cast<std::int64_t>(kMaxNbytes / std::max<std::uint64_t>(part_nbytes, 1));
    return static_cast<int>(std::clamp<std::int64_t>(fitting, kMinUploads, kMaxUploads));
  }
};

/// Threads that upload parts, within UploadLimits. Thread-safe.
class UploadWorkers {
 public:
  /// `run` blocks while `max_waiting` tasks or more wait.
  explicit UploadWorkers(std::size_t max_waiting) : max_waiting_(max_waiting) {}
  /// Drops the tasks that have not begun, and waits for the running tasks.
  ~UploadWorkers();
  UploadWorkers(const UploadWorkers&) = delete;
  UploadWorkers& operator=(const UploadWorkers&) = delete;

  /// Queues `task` for a worker thread. `nbytes`: of the part that `task` holds in memory. Throws:
  /// the exception of an earlier task; once a task has failed, no further task runs.
  void run(std::uint64_t nbytes, std::function<void()> task);
  /// Waits until all tasks have ended. Throws: the exception of the first task that failed.
  void wait();
  /// Drops the tasks that have not begun, waits for the running tasks, and forgets failures.
  void stop() noexcept;

 private:
  struct Task {
    std::uint64_t nbytes = 0;
    std::function<void()> run;
    std::stop_token stop{};  // of the thread that queued the task
  };

  void work();
  bool may_begin_next() const;

  const std::size_t max_waiting_;
  std::mutex mutex_;
  std::condition_variable has_task_;
  std::condition_variable has_ended_;  // a task
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
  int num_running_ = 0;
  std::uint64_t nbytes_running_ = 0;
  std::exception_ptr failure_;
  bool is_ending_ = false;
};

}  // namespace tessera::object_store
