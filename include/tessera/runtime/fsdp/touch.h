#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// All-gathers the unit of a parameter of an open pass, as an operator that uses it does. For code
/// that reads `data_ptr()`, which is no operator. Does nothing for other tensors. Collective if the
/// unit is sharded now.
void touch(const at::Tensor& parameter);

}  // namespace tessera
