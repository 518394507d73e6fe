#pragma once

#include <cstddef>
#include <span>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::reshard {

/// A writer whose pieces are in memory, so that blocks can be read straight into their places.
class InMemoryWriter : public formats::CheckpointWriter {
 public:
  /// Returns the memory of elements `window` of a piece. A caller that fills this memory must not
  /// call `write_block` for these elements. The memory may have any alignment. Thread-safe.
  virtual std::span<std::byte> memory_of(PieceId piece, FlatRange window) = 0;
};

}  // namespace tessera::reshard
