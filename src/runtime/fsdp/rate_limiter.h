#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>

namespace tessera::fsdp {

/// An event after which freed memory may be used again.
class FreeEvent {
 public:
  virtual ~FreeEvent() = default;
  virtual void synchronize() = 0;
};

/// Limits how many unsharded flat parameters an asynchronous device such as a GPU still uses after
/// the host has freed them. If there are `kMaxInFlight` of them, the host waits until the device is
/// done with the oldest before it allocates the next one. Source: torch.distributed.fsdp,
/// `limit_all_gathers` (github.com/pytorch/pytorch, change 89057).
class RateLimiter {
 public:
  static constexpr std::size_t kMaxInFlight = 2;
  using MakeEvent = std::function<std::unique_ptr<FreeEvent>()>;

  /// `make_event` records an event on the device; null on the CPU, which needs no waiting.
  explicit RateLimiter(MakeEvent make_event = nullptr) : make_event_(std::move(make_event)) {}

  /// Call after freeing a flat parameter.
  void note_freed() {
    if (make_event_) events_.push_back(make_event_());
  }
  /// Call right before allocating a flat parameter.
  void wait_for_room() {
    if (events_.size() < kMaxInFlight) return;
    const std::unique_ptr<FreeEvent> oldest = std::move(events_.front());
    events_.pop_front();
    oldest->synchronize();
  }

 private:
  MakeEvent make_event_;
  std::deque<std::unique_ptr<FreeEvent>> events_;
};

}  // namespace tessera::fsdp
