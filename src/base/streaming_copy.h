#pragma once

#include <cstddef>

namespace tessera {

/// Copies as memcpy does, but writes past the caches if the processor can. Use it for megabytes
/// that nobody reads soon: whole cache lines are then written without being read first.
/// Requires: the two ranges do not overlap.
void streaming_copy(void* to, const void* from, std::size_t nbytes);

}  // namespace tessera
