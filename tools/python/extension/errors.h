#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Registers a translator: a tessera::Error that leaves the extension becomes a Python
/// `tessera.Error` with its kind, path, tensor and byte range.
void translate_errors();

}  // namespace tessera::python
