#pragma once

#include <cstddef>
#include <span>

namespace tessera::embedding {

/// Asks the system to hold memory in huge pages, as far as whole ones fit into it: rows at random
/// then wait less for addresses to be translated. Best before the memory is first written. A wish:
/// where the system does not know it, nothing happens.
void prefer_huge_pages(std::span<std::byte> memory);

}  // namespace tessera::embedding
