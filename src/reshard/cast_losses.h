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

/// For each tensor of the destination, counts the numbers that were too large for the cast, and
/// those that it made zero. Several threads may call `add`; call the other functions only after all
/// calls of `add`.
class CastLossesByTensor {
 public:
  /// Adds the losses of one block. `block` is the block's number in the move.
  void add(std::size_t tensor_index, std::int64_t block, const CastLosses& losses);

  const std::map<std::size_t, CastLosses>& by_tensor() const { return by_tensor_; }
  /// Returns the index of the tensor to which the first block with too large numbers belongs.
  /// Requires: there is a block with too large numbers.
  std::size_t first_too_large() const { return first_too_large_; }
  /// Returns the number of the first block with too large numbers; the largest std::int64_t if
  /// there is none.
  std::int64_t first_block_too_large() const { return first_block_; }

 private:
  std::mutex mutex_;
  std::map<std::size_t, CastLosses> by_tensor_;
  std::int64_t first_block_ = std::numeric_limits<std::int64_t>::max();
  std::size_t first_too_large_ = 0;
};

/// Converts the user's choice for numbers that are too large to the choice of the cast functions.
/// For `refuse` the result has no effect, because the move fails.
TooLarge too_large_by(OnOverflow on_overflow);

/// Returns the error for a tensor with numbers too large for `to`. `fqn` is its name in the source.
Error overflow_error(const std::string& source_path, const std::string& fqn, DType to,
                     const CastLosses& losses);

}  // namespace tessera::reshard
