#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::python {

/// Returns tuples `(severity, rule, path, tensor, byte_range, expected, found, text)`: the fields
/// of a `tessera.Problem`.
nanobind::list findings_to_python(const std::vector<formats::Finding>& findings);

}  // namespace tessera::python
