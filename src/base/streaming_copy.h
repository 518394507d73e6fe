#pragma once

#include <cstddef>

namespace tessera {

/// Copies as memcpy does, but writes past the caches, where the processor can: nobody reads the
/// copy soon, and lines that are written whole need not be read before. Worth it for megabytes.
/// Requires: the two do not overlap.
void streaming_copy(void* to, const void* from, std::size_t nbytes);

}  // namespace tessera
