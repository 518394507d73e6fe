#pragma once

#include "tessera/runtime/dist/mesh.h"

namespace tessera::sim {

/// Returns a transport between ranks that are threads, each with a device of its own. As NCCL's: a
/// collective runs on a stream of the group, behind the current stream; the wait of its work lets
/// the current stream wait, not the host; tensors are kept alive until then.
dist::Transport transport(at::Device device);

}  // namespace tessera::sim
