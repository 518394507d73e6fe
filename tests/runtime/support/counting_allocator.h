#pragma once

#include <cstdint>

namespace tessera::test {

/// What this thread has allocated through libtorch's CPU allocator and not freed, and the most that
/// it ever was since `reset_peak`. Memory counts for the thread that allocated it, so that ranks
/// that are threads are told apart. Units: bytes.
struct AllocatedMemory {
  std::int64_t now = 0;
  std::int64_t peak = 0;
};

/// Counts from the first call on, for the whole process.
AllocatedMemory allocated_memory();
void reset_peak();

}  // namespace tessera::test
