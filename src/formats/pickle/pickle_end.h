#pragma once

#include <cstdint>

#include "tessera/base/file_system.h"

namespace tessera::formats::pickle {

/// Returns the end of the pickle that starts at `begin`: the offset after its STOP, so that a
/// reader knows how many bytes to read. Looks only at the opcodes and the lengths of their
/// arguments. Throws: Error(corruption) if the file ends within the pickle, for a byte that is no
/// opcode, or for a pickle of more than `max_nbytes`; Error(io). Cost: reads the pickle once, in
/// small buffers.
std::uint64_t pickle_end(const ReadableFile& file, std::uint64_t begin, std::uint64_t max_nbytes);

}  // namespace tessera::formats::pickle
