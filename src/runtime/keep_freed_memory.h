#pragma once

#include <ATen/Functions.h>

#include <cstdint>

namespace tessera {

/// Lets glibc keep up to 64 MiB of freed memory, if the process has set no other limit. A training
/// step frees and takes the same temporaries again: gradients of weights, intermediate results of
/// an optimizer. glibc returns all but twice the largest mapped block ever freed to the operating
/// system, at most 64 MiB (mallopt(3), M_MMAP_THRESHOLD), and fresh pages cost 3 % of a step. As
/// replicated gradients stay allocated, this takes and frees such a block once, without touching
/// its pages.
inline void keep_freed_memory() {
  constexpr std::int64_t kJustBelowTheLargestThreshold = (32 << 20) - (1 << 16);
  at::empty({kJustBelowTheLargestThreshold}, at::kByte);
}

}  // namespace tessera
