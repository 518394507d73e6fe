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

/// Threads that upload. Their number bounds the memory of uploads. Thread-safe.
class UploadWorkers {
 public:
  /// `max_waiting`: how many tasks may wait before `run` makes its caller wait.
  UploadWorkers(int num_threads, std::size_t max_waiting)
      : num_threads_(num_threads), max_waiting_(max_waiting) {}
  /// Drops the tasks that have not begun, and waits for the others.
  ~UploadWorkers();
  UploadWorkers(const UploadWorkers&) = delete;
  UploadWorkers& operator=(const UploadWorkers&) = delete;

  /// Runs `task` on a worker. Throws: what an earlier task threw; no further task runs then.
  void run(std::function<void()> task);
  /// Waits until all tasks have ended. Throws: what a task threw.
  void wait();
  /// Drops the tasks that have not begun, waits for the others, and forgets failures.
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
