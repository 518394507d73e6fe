#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>

#include "base/cast.h"
#include "tessera/base/error.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Collects for each tensor of the destination what casts did to its numbers, apart from rounding.
/// Thread-safe, except for the functions that read.
class CastLossesByTensor {
 public:
  /// Adds what block `block` of the move found.
  void add(std::size_t tensor_index, std::int64_t block, const CastLosses& losses);

  const std::map<std::size_t, CastLosses>& by_tensor() const { return by_tensor_; }
  /// Returns the tensor of the first block with numbers that were too large. Requires: there is
  /// such a block.
  std::size_t first_too_large() const { return first_too_large_; }
  /// Returns the number of this block. If no block had such numbers: the largest std::int64_t.
  std::int64_t first_block_too_large() const { return first_block_; }

 private:
  std::mutex mutex_;
  std::map<std::size_t, CastLosses> by_tensor_;
  std::int64_t first_block_ = std::numeric_limits<std::int64_t>::max();
  std::size_t first_too_large_ = 0;
};

/// Returns what a cast makes of numbers that are too large. For `refuse` the result does not
/// matter.
TooLarge too_large_by(OnOverflow on_overflow);

/// Returns the error for a tensor whose cast to `to` is refused. `fqn` is its name in the source.
Error overflow_error(const std::string& source_path, const std::string& fqn, DType to,
                     const CastLosses& losses);

}  // namespace tessera::reshard
