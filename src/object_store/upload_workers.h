#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::object_store {

/// Threads that upload parts. Their number limits the memory of uploads, because each holds one
/// part. Thread-safe.
class UploadWorkers {
 public:
  /// `max_waiting`: the number of waiting tasks from which on `run` blocks.
  UploadWorkers(int num_threads, std::size_t max_waiting)
      : num_threads_(num_threads), max_waiting_(max_waiting) {}
  /// Drops the tasks that have not begun, and waits for the running tasks.
  ~UploadWorkers();
  UploadWorkers(const UploadWorkers&) = delete;
  UploadWorkers& operator=(const UploadWorkers&) = delete;

  /// Runs `task` on a worker, later. Throws: the exception of an earlier task; after that, no
  /// further task runs.
  void run(std::function<void()> task);
  /// Waits until all tasks have ended. Throws: the exception of a task.
  void wait();
  /// Drops the tasks that have not begun, waits for the running tasks, and forgets failures.
  void stop() noexcept;

 private:
  void work();

  const int num_threads_;
  const std::size_t max_waiting_;
  std::mutex mutex_;
  std::condition_variable has_task_;
  std::condition_variable has_ended_;  // a task
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  std::size_t num_running_ = 0;
  std::exception_ptr failure_;
  bool is_ending_ = false;
};

}  // namespace tessera::object_store
