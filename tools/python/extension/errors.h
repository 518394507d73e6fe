#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Makes every tessera::Error that leaves the extension a Python `tessera.Error` with its kind,
/// path, tensor and byte range.
void translate_errors();

}  // namespace tessera::python
