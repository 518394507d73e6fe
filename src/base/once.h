#pragma once

#include <atomic>
#include <mutex>

namespace tessera::detail {

/// Does some work once. Replaces `std::call_once`: if a program links the C++ library statically,
/// as the tools do, an exception that leaves `std::call_once` ends the program.
class Once {
 public:
  /// Runs `body` unless an earlier call has completed it. Other threads wait. If `body` throws, the
  /// next call runs it again.
  template <class Body>
  void run(const Body& body) {
    if (is_done_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    if (is_done_.load(std::memory_order_relaxed)) return;
    body();
    is_done_.store(true, std::memory_order_release);
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_done_ = false;
};

}  // namespace tessera::detail
