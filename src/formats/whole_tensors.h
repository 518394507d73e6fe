#pragma once

#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Checks that every tensor that has elements is one piece. `format`: the format's name, for the
/// message. Throws: Error(invalid_argument) with `destination` and the tensor's name.
void require_whole_tensors(const CheckpointContents& contents, const std::string& destination,
                           std::string_view format);

/// Returns the contents for a format without pieces, flat units and annotations: each tensor is one
/// piece on rank 0. Throws: as require_whole_tensors; Error(invalid_argument) for key paths that
/// contradict each other.
CheckpointContents on_one_rank(CheckpointContents contents, const std::string& destination,
                               std::string_view format);

}  // namespace tessera::formats
