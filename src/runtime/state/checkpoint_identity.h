#pragma once

#include <functional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// Returns a SHA-256 by which ranks check that they opened the same checkpoint, or copies of it.
/// Covers the metadata of the selected tensors, and some elements of a few of them: two runs of one
/// model differ only there. Damaged tensors are marked as such; reading reports them later. Throws:
/// Error(io).
std::string identity_of(const formats::CheckpointReader& reader,
                        const std::function<bool(const std::string& fqn)>& is_selected);

}  // namespace tessera::state
