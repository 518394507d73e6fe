#pragma once

#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// Returns the problem that there are extra files (`names`) in `folder`, although
/// ExtraFilesPolicy::refuse allows none. Gives their number and the first names.
formats::Finding refusal_of_extra_files(const std::string& folder,
                                        const std::vector<std::string>& names);

}  // namespace tessera::reshard
