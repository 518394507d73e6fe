#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>

namespace tessera::fsdp {

/// Reached when memory that was freed may be used again.
class FreeEvent {
 public:
  virtual ~FreeEvent() = default;
  virtual void synchronize() = 0;
};

/// Bounds how many unsharded flat parameters are in flight on a device that runs behind the host:
/// before memory for one more is taken, the host waits until the oldest of `kMaxInFlight` freed
/// ones is free on the device too. Source: torch.distributed.fsdp, `limit_all_gathers`
/// (github.com/pytorch/pytorch, change 89057).
class RateLimiter {
 public:
  static constexpr std::size_t kMaxInFlight = 2;
  using MakeEvent = std::function<std::unique_ptr<FreeEvent>()>;

  /// `make_event` records an event on the device; none on CPU, where what is freed is free.
  explicit RateLimiter(MakeEvent make_event = nullptr) : make_event_(std::move(make_event)) {}

  /// To be called when a flat parameter has been freed.
  void note_freed() {
    if (make_event_) events_.push_back(make_event_());
  }
  /// To be called right before memory is taken, and after what needs none.
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
