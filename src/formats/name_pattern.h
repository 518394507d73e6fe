#pragma once

#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns the pattern by which a NameSelection selects the entry `name` and no other: `args`, or
/// `=args` if other names of the contents begin with `args.`, such as `args.weight`.
std::string pattern_of(const CheckpointContents& contents, std::string_view name);

}  // namespace tessera::formats
