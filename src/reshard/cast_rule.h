#pragma once

#include "tessera/base/tensor_meta.h"

namespace tessera::reshard {

/// Returns whether a tensor keeps its dtype in every cast: a tensor without dimensions (a step, a
/// learning rate, a scale), or an entry of an optimizer's `param_groups`. Rounding would damage
/// these numbers and would save no memory. `meta` is the tensor's in the source.
bool is_never_cast(const TensorMeta& meta);

}  // namespace tessera::reshard
