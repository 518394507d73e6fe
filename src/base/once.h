#pragma once

#include <atomic>
#include <mutex>

namespace tessera::detail {

/// Does work once, for whoever asks first. In place of `std::call_once`, through which no exception
/// gets in a program that is linked to the C++ library statically, as the tools are: it ends there.
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
