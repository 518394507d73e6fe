#pragma once

#include <functional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// Returns a SHA-256 by which ranks tell whether they have opened the same checkpoint, though
/// perhaps copies of it: of what its selected tensors are, and of some elements of a few of them,
/// as two runs of one model differ in nothing else. What is damaged counts by being so; reading it
/// will tell. Throws: Error(io).
std::string identity_of(const formats::CheckpointReader& reader,
                        const std::function<bool(const std::string& fqn)>& is_selected);

}  // namespace tessera::state
