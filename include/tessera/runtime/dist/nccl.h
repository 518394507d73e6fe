#pragma once

#include <optional>

#include "tessera/runtime/dist/transport.h"

// Of the target tessera::nccl, which is built where torch comes with CUDA.

namespace tessera::dist {

/// NCCL, through c10d; for tensors on CUDA devices. `device_index`: this rank's; none: that of its
/// place on this host (LOCAL_RANK, and what mpirun and srun say), 0 without a launcher. Becomes the
/// current device of the calling thread. Throws: Error(unsupported) where there is no such device.
Transport nccl(std::optional<int> device_index = std::nullopt);

}  // namespace tessera::dist
