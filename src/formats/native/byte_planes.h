#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera::formats::native {

/// Puts the first bytes of all elements first, then all second bytes, and so on (each such run is a
/// plane), so that similar bytes are next to each other. Same as HDF5's filter `shuffle`.
/// Requires: the spans have one size, a multiple of `itemsize` (1, 2, 4, 8 or 16); no overlap.
void shuffle_bytes(std::span<const std::byte> elements, std::uint64_t itemsize,
                   std::span<std::byte> planes);

/// Undoes `shuffle_bytes` for a range: fills `elements` with the elements `[begin, end)`. `planes`
/// holds the shuffled bytes of all elements.
void unshuffle_bytes(std::span<const std::byte> planes, std::uint64_t itemsize, std::uint64_t begin,
                     std::uint64_t end, std::span<std::byte> elements);

}  // namespace tessera::formats::native
