#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/runtime/dist/mesh.h"

// Each program of the benchmarks that trains is built twice: with on_cpu.cpp, and, if torch has
// CUDA, with on_cuda.cpp.

namespace tessera::bench {

/// Connects the ranks that a launcher has started, by Gloo or NCCL. Collective.
dist::Mesh connect();
/// Returns this rank's device. Requires: `connect`.
at::Device device();
/// Waits until the device has finished all its work.
void wait_for_device();
/// Returns the most memory that tensors had on the device; on the CPU, the most memory that this
/// process had resident.
std::int64_t peak_nbytes();

}  // namespace tessera::bench
