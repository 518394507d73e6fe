#pragma once

#include <cstddef>
#include <span>

namespace tessera::embedding {

/// Asks the system to use huge pages for those parts of `memory` that whole huge pages fit into.
/// Random access then has fewer TLB misses. Call this before the memory is first written. Does
/// nothing on systems without this feature.
void prefer_huge_pages(std::span<std::byte> memory);

}  // namespace tessera::embedding
