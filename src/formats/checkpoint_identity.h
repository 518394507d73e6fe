#pragma once

#include <functional>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns a SHA-256 by which ranks check that they have opened the same checkpoint, or copies of
/// it. It covers the names, dtypes and shapes of the selected tensors; some elements of a few of
/// them, because two checkpoints of one model may differ only there; and at most 1000 selected
/// values, without those of single ranks. For a damaged element or value it covers the kind of the
/// error; the load reports this error later. Throws: Error(io) if reading fails.
std::string identity_of(const CheckpointReader& reader,
                        const std::function<bool(const std::string& fqn)>& is_selected);

}  // namespace tessera::formats
