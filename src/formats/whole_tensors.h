#pragma once

#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Checks that every tensor with elements is one piece. `format` is for the message. Throws:
/// Error(invalid_argument) with `destination` and the tensor's name.
void require_whole_tensors(const CheckpointContents& contents, const std::string& destination,
                           std::string_view format);

}  // namespace tessera::formats
