#pragma once

#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Throws unless every entry of a checkpoint has a name of its own. `path`: of the checkpoint, for
/// the message; `advice`: what the user can do about two entries of one name.
/// Throws: Error(unsupported) with the name.
void require_distinct_names(const CheckpointContents& contents, const std::string& path,
                            std::string_view advice);

}  // namespace tessera::formats
