#pragma once

#include <map>
#include <mutex>
#include <string>

#include "base/cast.h"

namespace tessera::arithmetic {

/// Counts, for each tensor, the numbers that were too large for its dtype or became zero when a
/// calculated number was rounded. Thread-safe.
class RoundingLosses {
 public:
  void add(const std::string& fqn, const CastLosses& losses) {
    if (losses.num_too_large == 0 && losses.num_became_zero == 0) return;
    const std::lock_guard lock(mutex_);
    by_name_[fqn].merge(losses);
  }
  std::map<std::string, CastLosses> all() const {
    const std::lock_guard lock(mutex_);
    return by_name_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, CastLosses> by_name_;
};

}  // namespace tessera::arithmetic
