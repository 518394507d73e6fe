#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "python_remedies.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::python {

/// Returns tuples `(severity, rule, path, tensor, byte_range, expected, found, text)`: the fields
/// of a `tessera.Problem`. `remedy_text` says in the text what the user can do.
nanobind::list findings_to_python(const std::vector<formats::Finding>& findings,
                                  std::string (*remedy_text)(const Remedy&) = python_remedy);

}  // namespace tessera::python
