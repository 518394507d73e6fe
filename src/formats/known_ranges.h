#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "tessera/base/error.h"

namespace tessera::formats {

/// Where a piece's bytes are.
struct KnownRange {
  std::string path;  // as it was opened
  /// The elements in row-major order, perhaps with some bytes before and behind them. Empty if the
  /// piece is not one range of the file, or is compressed.
  std::optional<ByteRange> bytes;
};

/// A source that knows where its pieces are without reading any file. Thread-safe.
class KnownRanges {
 public:
  virtual ~KnownRanges() = default;
  /// Returns nothing if that is not known.
  virtual std::optional<KnownRange> known_range(std::size_t tensor_index,
                                                std::size_t piece_index) const = 0;
};

}  // namespace tessera::formats
