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
  /// Returns whether the module is used within this pass: else nothing was done.
  virtual bool meet(const MeetingPoint& point) = 0;

 protected:
  ~BringsRanksTogether() = default;
};

/// Kept at a module whose forward and backward run collectives of their own, on all ranks. While a
/// rank waits there for the others it takes part in nothing else, so it must not come before the
/// others have all they need from it. Thread-safe.
class MeetingPoint final : public ModuleState {
 public:
  using Passes = std::vector<std::weak_ptr<BringsRanksTogether>>;

  void add(std::weak_ptr<BringsRanksTogether> pass) {
    const std::lock_guard lock(mutex_);
    std::erase_if(passes_, [](const auto& each) { return each.expired(); });
    passes_.push_back(std::move(pass));
  }

  /// To be called before the collectives of a forward. Returns the passes that it is a part of.
  Passes meet() const {
    std::unique_lock lock(mutex_);
    const Passes passes = passes_;
    lock.unlock();
    return meet_in(passes);
  }
  /// To be called before those of its backward, with what `meet` has returned.
  Passes meet_in(const Passes& passes) const {
    Passes met;
    for (const auto& each : passes) {
      if (const auto pass = each.lock(); pass && pass->meet(*this)) met.push_back(each);
    }
    return met;
  }

 private:
  mutable std::mutex mutex_;
  Passes passes_;  // over roots above the module
};

}  // namespace tessera::registry
