#pragma once

#include "formats/megatron/optimizer.h"

namespace tessera::formats::megatron {

/// Whether the fp32 numbers at `weights`, rounded to the model's dtype, equal the parameter's in
/// the model file. Compares only the first 16 numbers, so that checkpoints with many parameters
/// open quickly.
bool have_same_numbers(const Elements& weights, const Parameter& parameter);

}  // namespace tessera::formats::megatron
