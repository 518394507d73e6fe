#pragma once

#include <string>
#include <vector>

#include "formats/staging/shared_work.h"

namespace tessera::cli {

/// Throws an error that lists the parts of a shared move that are not complete.
[[noreturn]] void refuse_incomplete(const std::string& destination, int num_parts,
                                    const std::vector<formats::SharedWork::Incomplete>& parts);

}  // namespace tessera::cli
