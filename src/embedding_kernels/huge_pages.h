#pragma once

#include <cstddef>
#include <span>

namespace tessera::embedding {

/// Asks the system to use huge pages for the whole huge pages within `memory`: random access then
/// has fewer TLB misses. Call it before the memory is first written. Does nothing on systems
/// without this feature.
void prefer_huge_pages(std::span<std::byte> memory);

}  // namespace tessera::embedding
