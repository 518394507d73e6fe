#pragma once

#include <cstddef>

namespace tessera {

/// Copies as memcpy does, but its writes bypass the caches if the processor can do this. Use it for
/// megabytes that nobody reads soon. It is faster because an ordinary write first reads the cache
/// line that it changes.
/// Requires: the two ranges do not overlap.
void streaming_copy(void* to, const void* from, std::size_t nbytes);

}  // namespace tessera
