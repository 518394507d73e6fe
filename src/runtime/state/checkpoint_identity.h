#pragma once

#include <functional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// Returns a SHA-256 by which ranks check that they opened the same checkpoint, or copies of it.
/// Covers the metadata of the selected tensors, and some elements of a few of them, because
/// checkpoints of two runs of one model differ only in the elements. If these elements are damaged,
/// covers the kind of the error instead; reading reports the damage later. Throws: Error(io) if
/// reading fails.
std::string identity_of(const formats::CheckpointReader& reader,
                        const std::function<bool(const std::string& fqn)>& is_selected);

}  // namespace tessera::state
