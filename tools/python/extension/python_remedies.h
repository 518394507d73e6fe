#pragma once

#include <string>

#include "tessera/base/error.h"

namespace tessera::python {

/// Returns what the user can do about an error, with the keywords of the Python package; empty for
/// Action::none.
std::string python_remedy(const Remedy& remedy);
/// Does the same for a problem of tessera.load, which has no option that merges state.
std::string python_remedy_of_load(const Remedy& remedy);

}  // namespace tessera::python
