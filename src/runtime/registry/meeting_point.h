#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "tessera/runtime/registry/registry.h"

namespace tessera::registry {

class MeetingPoint;

/// What a pass (a forward and its backward over a fully sharded model) offers to a module with its
/// own collectives: a barrier that ends when all ranks have reached the module.
class BringsRanksTogether {
 public:
  /// Waits until all ranks are about to run the collectives of the module at `point`, and returns
  /// true. Collective. Returns false, without waiting, if the module is used outside of this pass.
  virtual bool meet(const MeetingPoint& point) = 0;

 protected:
  ~BringsRanksTogether() = default;
};

/// A barrier before the collectives of one module, in its forward or backward. A rank that waits at
/// the barrier takes part in no other collective. So before a rank waits, it must finish all
/// collectives that the other ranks need. Thread-safe.
class MeetingPoint final : public ModuleState {
 public:
  using Passes = std::vector<std::weak_ptr<BringsRanksTogether>>;

  void add(std::weak_ptr<BringsRanksTogether> pass) {
    const std::lock_guard lock(mutex_);
    std::erase_if(passes_, [](const auto& each) { return each.expired(); });
    passes_.push_back(std::move(pass));
  }

  /// Waits for all ranks. To be called before the collectives of a forward. Returns the passes that
  /// include the forward.
  Passes meet() const {
    std::unique_lock lock(mutex_);
    const Passes passes = passes_;
    lock.unlock();
    return meet_in(passes);
  }
  /// Waits for all ranks. To be called before the collectives of a backward, with the result of
  /// `meet` in its forward. Returns the passes that include the backward.
  Passes meet_in(const Passes& passes) const {
    Passes met;
    for (const auto& each : passes) {
      if (const auto pass = each.lock(); pass && pass->meet(*this)) met.push_back(each);
    }
    return met;
  }

 private:
  mutable std::mutex mutex_;
  Passes passes_;  // of all fully sharded roots that contain the module
};

}  // namespace tessera::registry
