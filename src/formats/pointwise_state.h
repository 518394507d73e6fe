#pragma once

#include <string_view>

#include "tessera/base/dtype.h"

namespace tessera::formats {

/// Returns whether optimizer state of this name has one element for each element of its parameter,
/// as `exp_avg` has in the optimizers of PyTorch. Others may use the name for state of another
/// shape.
bool is_pointwise_name(std::string_view name);

/// Returns whether this is what 8-bit optimizers have instead of pointwise state: codes of one
/// byte, or the scales and tables that say what the codes mean, which bitsandbytes calls `absmax1`
/// and `qmap1`. Each scale belongs to a block of codes of one rank.
bool is_quantized_state(std::string_view fqn, DType dtype);

}  // namespace tessera::formats
