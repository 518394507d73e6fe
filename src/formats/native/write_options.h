#pragma once

#include "tessera/formats/native.h"

namespace tessera::formats::native {

/// Throws Error(invalid_argument) naming the option if an option is out of its range.
void validate_options(const NativeWriteOptions& options);

}  // namespace tessera::formats::native
