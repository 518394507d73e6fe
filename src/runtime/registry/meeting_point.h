#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "tessera/runtime/registry/registry.h"

namespace tessera::registry {

class MeetingPoint;

/// Has all ranks come to a module before it runs collectives of its own.
class BringsRanksTogether {
 public:
  /// Returns when all ranks are about to run the collectives of the module at `point`. Collective.
  virtual void meet(const MeetingPoint& point) = 0;

 protected:
  ~BringsRanksTogether() = default;
};

/// Kept at a module whose forward and backward run collectives of their own, on all ranks. While a
/// rank waits there for the others it takes part in nothing else, so it must not come before the
/// others have all they need from it. Thread-safe.
class MeetingPoint final : public ModuleState {
 public:
  void add(std::weak_ptr<BringsRanksTogether> pass) {
    const std::lock_guard lock(mutex_);
    std::erase_if(passes_, [](const auto& each) { return each.expired(); });
    passes_.push_back(std::move(pass));
  }

  /// To be called before those collectives.
  void meet() const {
    std::unique_lock lock(mutex_);
    const auto passes = passes_;
    lock.unlock();
    for (const auto& each : passes) {
      if (const auto pass = each.lock()) pass->meet(*this);
    }
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<BringsRanksTogether>> passes_;  // over roots above the module
};

}  // namespace tessera::registry
