#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Adds `Reader` and `TensorSource`: an open checkpoint, and one tensor of it.
void bind_reader(nanobind::module_& module);

}  // namespace tessera::python
