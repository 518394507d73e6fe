#pragma once

#include <string>

#include "tessera/base/error.h"

namespace tessera::python {

/// Returns a remedy in the words of Python; empty for Action::none.
std::string python_remedy(const Remedy& remedy);

}  // namespace tessera::python
