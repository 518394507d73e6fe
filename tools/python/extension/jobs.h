#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Adds `verify`: what is wrong with a checkpoint.
void bind_verify(nanobind::module_& module);

/// Adds `move`: of a checkpoint, a part of one, or several as one, in the words of ckpt-reshard.
void bind_move(nanobind::module_& module);

}  // namespace tessera::python
