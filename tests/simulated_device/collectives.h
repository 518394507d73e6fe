#pragma once

#include "tessera/runtime/dist/mesh.h"

namespace tessera::sim {

/// Returns a transport between ranks that are threads, each with a device of its own. It behaves
/// like NCCL's. A collective runs on the group's own stream, after the present work of the current
/// stream. `wait` makes the current stream wait, not the host. The collective keeps its tensors
/// alive until `wait`.
dist::Transport transport(at::Device device);

}  // namespace tessera::sim
