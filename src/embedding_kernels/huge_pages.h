#pragma once

#include <cstddef>
#include <span>

namespace tessera::embedding {

/// Asks the system to use huge pages for `memory`, as far as whole huge pages fit. Random access
/// then has fewer TLB misses. To be called before the memory is first written. Does nothing on
/// systems without this feature.
void prefer_huge_pages(std::span<std::byte> memory);

}  // namespace tessera::embedding
