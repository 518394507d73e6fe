#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::object_store {

/// Threads that wait for servers: with the caller's own, the requests in flight. Started when first
/// needed. Thread-safe.
class RequestWorkers {
 public:
  enum class Turn { next, last };

  /// Returns the workers of the process. They end with it; transfers are then aborted.
  static RequestWorkers& of_process();
  RequestWorkers() = default;
  ~RequestWorkers();
  RequestWorkers(const RequestWorkers&) = delete;
  RequestWorkers& operator=(const RequestWorkers&) = delete;

  /// Runs `task`, which must not throw, on a worker. In a child of fork(), which has no workers,
  /// runs it at once.
  void run(Turn turn, std::function<void()> task);

 private:
  static constexpr std::size_t kMaxThreads = 16;

  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  std::size_t num_idle_ = 0;
  bool is_ending_ = false;
  pid_t process_ = 0;
};

}  // namespace tessera::object_store
