#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "base/cast.h"
#include "tessera/layout/region.h"

namespace tessera::arithmetic {

/// Counts, for each tensor, the numbers that were too large for its dtype or became zero when a
/// calculated number was rounded. A move can read an element more than once, such as for replicas;
/// `take` says which elements to count. Thread-safe.
class RoundingLosses {
 public:
  /// A part of a range that is read.
  struct Part {
    FlatRange range;
    bool is_new = false;  // no earlier `take` returned it: the caller must `add` its losses

    friend bool operator==(const Part&, const Part&) = default;
  };

  /// Divides `range` (elements of `region`, in its own row-major order) into parts that an earlier
  /// call returned and parts that are new. Regions of one tensor must be equal or disjoint. If
  /// several threads each read a share of one range, each passes its own number as `share`.
  std::vector<Part> take(const std::string& fqn, const Region& region, FlatRange range,
                         int share = 0);

  void add(const std::string& fqn, const CastLosses& losses);
  std::map<std::string, CastLosses> all() const;

 private:
  using Ranges = std::map<std::int64_t, std::int64_t>;  // begin -> end; with gaps between

  mutable std::mutex mutex_;
  std::map<std::string, CastLosses> by_name_;
  std::map<std::tuple<std::string, int, Region>, Ranges> taken_;
};

}  // namespace tessera::arithmetic
