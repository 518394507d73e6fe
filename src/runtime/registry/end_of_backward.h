#pragma once

#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <memory>
#include <utility>

namespace tessera::registry {

/// Runs an action at the end of the current backward. If a backward fails, the engine destroys the
/// queued action; `is_queued` then returns false.
class EndOfBackward {
 public:
  /// Returns whether an action waits for the end of a backward that has not failed.
  bool is_queued() const { return !queued_.expired(); }
  /// Requires: a backward is running on this thread.
  void queue(std::function<void()> action) {
    const auto token = std::make_shared<int>();
    queued_ = token;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [action = std::move(action), token] { action(); });
  }
  void forget() { queued_.reset(); }

 private:
  std::weak_ptr<void> queued_;
};

}  // namespace tessera::registry
