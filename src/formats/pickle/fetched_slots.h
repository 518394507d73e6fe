#pragma once

#include <cstddef>
#include <vector>

#include "formats/pickle/pickle_bytes.h"

namespace tessera::formats::pickle {

/// Returns for each memo slot whether some opcode from `begin` on fetches it. No opcode there
/// fetches a slot beyond the end of the result. Stops without an error where the pickle is damaged.
/// Looks only at opcodes and executes nothing. If `pickle` was not loaded completely, load the
/// bytes from `begin` on again afterwards. Cost: linear; at most one bit for each byte.
std::vector<bool> fetched_slots(PickleBytes& pickle, std::size_t begin);

}  // namespace tessera::formats::pickle
