#pragma once

#include <mutex>
#include <set>
#include <string>

namespace tessera::arithmetic {

/// The names of tensors in which rounding turned nonzero numbers into zero. Thread-safe.
class UnderflowNames {
 public:
  void add(const std::string& fqn) {
    const std::lock_guard lock(mutex_);
    names_.insert(fqn);
  }
  std::set<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return names_;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> names_;
};

}  // namespace tessera::arithmetic
