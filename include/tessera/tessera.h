#pragma once

/// Includes everything that a trainer uses. Needs libtorch, so the core and tools never include it.
#include "tessera/runtime/dist/launch.h"
#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/embedding/input_pipeline.h"
#include "tessera/runtime/embedding/plan_tables.h"
#include "tessera/runtime/embedding/shard.h"
#include "tessera/runtime/fsdp/forward.h"
#include "tessera/runtime/fsdp/fully_shard.h"
#include "tessera/runtime/fsdp/parameter_map.h"
#include "tessera/runtime/fsdp/unshard_params.h"
#include "tessera/runtime/recompute/recompute.h"
#include "tessera/runtime/registry/parameters.h"
#include "tessera/runtime/registry/state_dict_hooks.h"
#include "tessera/runtime/replicate/replicate.h"
#include "tessera/runtime/state/module_state_dict.h"
#include "tessera/runtime/state/optim_state_dict.h"
#include "tessera/runtime/state/train_state.h"
