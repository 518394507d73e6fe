#pragma once

#include <ATen/Functions.h>

#include <cstdint>

namespace tessera {

/// Makes glibc keep up to 64 MiB of freed memory for later allocations, unless the process has set
/// such a limit itself. Each training step frees and allocates the same temporaries: gradients of
/// weights, intermediate results of an optimizer. Fresh pages for them cost 3 % of a step.
/// glibc keeps twice the size of the largest mmapped block that the process has freed, at most
/// 64 MiB, and returns the rest to the operating system (mallopt(3), M_MMAP_THRESHOLD). So this
/// function allocates and frees a block of almost 32 MiB, without writing to its pages.
inline void keep_freed_memory() {
  constexpr std::int64_t kJustBelowTheLargestThreshold = (32 << 20) - (1 << 16);
  at::empty({kJustBelowTheLargestThreshold}, at::kByte);
}

}  // namespace tessera
