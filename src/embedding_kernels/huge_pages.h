#pragma once

#include <cstddef>
#include <span>

namespace tessera::embedding {

/// Asks the system to back `memory` with huge pages, where a whole huge page fits. Random access
/// then has fewer TLB misses. Call it before the memory is first written. Does nothing on systems
/// without this feature.
void prefer_huge_pages(std::span<std::byte> memory);

}  // namespace tessera::embedding
