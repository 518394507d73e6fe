#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::object_store {

/// Threads that send requests and wait for servers. Their number limits how many requests run at
/// the same time. Started when they are first needed. Thread-safe.
class RequestWorkers {
 public:
  enum class Turn { next, last };  // before or after the tasks that wait already

  /// Returns the workers that all code shares. At the end of the process, their transfers are
  /// aborted and the threads end.
  static RequestWorkers& of_process();
  RequestWorkers() = default;
  ~RequestWorkers();
  RequestWorkers(const RequestWorkers&) = delete;
  RequestWorkers& operator=(const RequestWorkers&) = delete;

  /// Runs `task`, which must not throw, on a worker. Runs it in this thread if no thread can be
  /// started, or in a child of fork() (it has no workers).
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
  const pid_t process_ = ::getpid();
};

}  // namespace tessera::object_store
