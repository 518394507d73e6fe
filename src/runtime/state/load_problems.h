#pragma once

#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// Throws Error(mismatch) that lists all problems, a line each; nothing where there are none.
void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems);

}  // namespace tessera::state
