#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// Gathers the unit that a parameter of an open pass belongs to, as an operator that uses it would.
/// For code that reads `data_ptr()` by itself, which no operator sees. Nothing for other tensors.
/// Collective where the unit is sharded now.
void touch(const at::Tensor& parameter);

}  // namespace tessera
