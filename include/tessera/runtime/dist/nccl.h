#pragma once

#include <optional>

#include "tessera/runtime/dist/mesh.h"

// In the target tessera::nccl, which is built if torch has CUDA.

namespace tessera::dist {

/// Returns NCCL through c10d, for CUDA tensors. `device_index`: this rank's GPU. Default: the local
/// rank that the launcher reports (see launch.h), else 0. The GPU becomes the current device of the
/// calling thread. Throws: Error(unsupported) if there is no such GPU.
Transport nccl(std::optional<int> device_index = std::nullopt);

}  // namespace tessera::dist
