#pragma once

#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <memory>
#include <utility>

namespace tessera::registry {

/// What is to be done when the backward that runs now has ended. One that fails never comes to its
/// end, and is known by that: the engine lets go of what was queued with it.
class EndOfBackward {
 public:
  /// Whether something waits for the end of a backward that is still alive.
  bool is_queued() const { return !queued_.expired(); }
  /// Requires: a backward runs on this thread.
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
