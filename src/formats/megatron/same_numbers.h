#pragma once

#include "formats/megatron/optimizer.h"

namespace tessera::formats::megatron {

/// Whether the first weights of a parameter are those at `weights`, rounded to the model's dtype.
/// Reads few bytes, so that checkpoints with many parameters open quickly.
bool have_same_numbers(const Elements& weights, const Parameter& parameter);

}  // namespace tessera::formats::megatron
