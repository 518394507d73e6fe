#pragma once

#include <c10/core/ScalarType.h>

#include "tessera/base/dtype.h"

namespace tessera {

/// Returns Tessera's dtype for a torch dtype. Throws: Error(unsupported) for quantised dtypes.
DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);

}  // namespace tessera
