#pragma once

#include <cstdint>
#include <functional>

namespace tessera::test {

/// Returns by how much the resident memory of this process grows at most while `body` runs,
/// whatever allocates the memory. Call `give_back_freed_memory` first, and run nothing else in the
/// process. Units: bytes.
std::int64_t peak_growth(const std::function<void()>& body);

/// Makes malloc get each block of 128 KiB or more by an mmap of its own, from now on. `free` then
/// returns such a block to the system at once, so that it is no longer resident memory.
void give_back_freed_memory();

}  // namespace tessera::test
