#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Adds `verify`: what is wrong with a checkpoint.
void bind_verify(nanobind::module_& module);

/// Adds `reshard`: a move, in the words of ckpt-reshard.
void bind_reshard(nanobind::module_& module);

}  // namespace tessera::python
