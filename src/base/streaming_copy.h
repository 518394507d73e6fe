#pragma once

#include <cstddef>

namespace tessera {

/// Copies as memcpy does, but its writes bypass the processor's caches if the processor can do
/// this. That is faster, because an ordinary write first reads what it overwrites into the cache.
/// Use it for megabytes that are not read again soon.
/// Requires: the two ranges do not overlap.
void streaming_copy(void* to, const void* from, std::size_t nbytes);

}  // namespace tessera
