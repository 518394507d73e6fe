#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Adds `verify`, which finds the errors in a checkpoint.
void bind_verify(nanobind::module_& module);

/// Adds `scan`, which returns the names that pickles would import and call.
void bind_scan(nanobind::module_& module);

/// Adds `move`, which moves a checkpoint, a subset of one, or several merged into one.
void bind_move(nanobind::module_& module);

/// Adds `Job`, `SavePlan`, `Save` and `Load`, which save and load the state of a running job.
void bind_job(nanobind::module_& module);

}  // namespace tessera::python
