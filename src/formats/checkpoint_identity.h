#pragma once

#include <functional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns a SHA-256 by which ranks check that they have opened the same checkpoint, or copies of
/// it. It covers the metadata of the selected tensors, some elements of a few tensors, because two
/// checkpoints of one model may differ only in elements, and the selected values, because two steps
/// may differ only in a counter. If these elements or values cannot be read, the kind of the error
/// is hashed instead; the load reports the error later. Throws: Error(io) if reading fails.
std::string identity_of(const CheckpointReader& reader,
                        const std::function<bool(const std::string& fqn)>& is_selected);

}  // namespace tessera::formats
