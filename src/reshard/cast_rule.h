#pragma once

#include "tessera/base/tensor_meta.h"

namespace tessera::reshard {

/// Whether a cast never changes a tensor, whatever its role: a tensor without dimensions (a step, a
/// learning rate, a scale), or an entry of an optimizer's `param_groups`. Such numbers are exact,
/// or compared with others, and rounding them saves no memory. `meta` is that of the source.
bool is_never_cast(const TensorMeta& meta);

}  // namespace tessera::reshard
