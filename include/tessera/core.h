#pragma once

/// Includes all headers for programs that do not link libtorch. They can open, check, read, plan,
/// move and write checkpoints. Trainers, which link libtorch, include tessera/tessera.h instead.
#include "tessera/formats/base_checkpoint.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"
#include "tessera/formats/merge.h"
#include "tessera/formats/parts.h"
#include "tessera/inspect/tensor_reader.h"
#include "tessera/inspect/verify.h"
#include "tessera/layout/table_planner.h"
#include "tessera/recipe/recipe.h"
#include "tessera/reshard/base_comparison.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/job_state.h"
#include "tessera/reshard/store_destination.h"
