#pragma once

#include <c10/core/ScalarType.h>

#include "tessera/base/dtype.h"

namespace tessera {

/// Returns the core's name for a dtype of torch. Throws: Error(unsupported) for the quantised ones.
DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);

}  // namespace tessera
