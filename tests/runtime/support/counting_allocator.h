#pragma once

#include <cstdint>

namespace tessera::test {

/// The memory that this thread has allocated through libtorch's CPU allocator and that is not freed
/// yet. `peak`: the most since `reset_peak`. Memory counts for the thread that allocated it, so
/// each rank has its own numbers if ranks are threads. Units: bytes.
struct AllocatedMemory {
  std::int64_t now = 0;
  std::int64_t peak = 0;
};

/// Returns this thread's numbers. The first call in the process starts the counting.
AllocatedMemory allocated_memory();
void reset_peak();

}  // namespace tessera::test
