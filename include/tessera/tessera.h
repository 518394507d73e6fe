#pragma once

/// Everything that a trainer uses. Needs libtorch; the tools and the core do without this header.
#include "tessera/runtime/dist/launch.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/fsdp/clip_grad_norm.h"
#include "tessera/runtime/fsdp/forward.h"
#include "tessera/runtime/fsdp/fully_shard.h"
#include "tessera/runtime/fsdp/fully_sharded_data_parallel.h"
#include "tessera/runtime/fsdp/meta_device.h"
#include "tessera/runtime/fsdp/parameter_map.h"
#include "tessera/runtime/fsdp/touch.h"
#include "tessera/runtime/fsdp/unshard_params.h"
#include "tessera/runtime/recompute/recompute.h"
#include "tessera/runtime/registry/state_dict_hooks.h"
#include "tessera/runtime/replicate/replicate.h"
#include "tessera/runtime/state/optim_state_dict.h"
#include "tessera/runtime/state/state_dict.h"
#include "tessera/runtime/state/train_state.h"
