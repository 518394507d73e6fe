#pragma once

#include <cstddef>
#include <vector>

#include "formats/pickle/pickle_bytes.h"

namespace tessera::formats::pickle {

/// Returns for each memo slot whether some opcode from `begin` on fetches it. Slots from the
/// returned size on are not fetched there. Stops without an error where the pickle is damaged.
/// Looks only at opcodes and executes nothing. Unless all bytes are loaded, those from `begin` on
/// must be loaded again afterwards. Cost: linear; at most one bit for each byte.
std::vector<bool> fetched_slots(PickleBytes& pickle, std::size_t begin);

}  // namespace tessera::formats::pickle
