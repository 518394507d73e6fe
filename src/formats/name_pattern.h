#pragma once

#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns the pattern by which a NameSelection selects one entry and nothing else: `args`, or
/// `=args` if the contents have names below it, such as `args.weight`.
std::string pattern_of(const CheckpointContents& contents, std::string_view name);

}  // namespace tessera::formats
