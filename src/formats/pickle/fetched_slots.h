#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::formats::pickle {

/// Returns for each memo slot whether some opcode of the pickle fetches it. Slots beyond the end of
/// the result are never fetched. Stops without an error where the pickle is damaged. Looks only at
/// opcodes and executes nothing. Cost: linear; at most one bit for each byte.
std::vector<bool> fetched_slots(std::span<const char> pickle);

}  // namespace tessera::formats::pickle
