#pragma once

#include <string>

#include "tessera/base/error.h"

namespace tessera::python {

/// Returns what can be done about an error in Python; empty for Action::none.
std::string python_remedy(const Remedy& remedy);

}  // namespace tessera::python
