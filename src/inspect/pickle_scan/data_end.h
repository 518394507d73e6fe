#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/base/file_system.h"

namespace tessera::inspect {

/// Returns the number of bytes of the elements behind the header of a `.npy` file; nothing if the
/// header is not spelled exactly as `numpy.save` does, or its dtype has fields with fields.
std::optional<std::uint64_t> numpy_data_nbytes(std::string_view header);

/// Returns where the stream of `torch.save` (see TorchStream) that begins at `begin` ends, behind
/// its storages. Returns nothing if no stream begins there, or if the stream is damaged. Throws:
/// Error(io) or Error(interrupted).
std::optional<std::uint64_t> stream_end(const ReadableFile& file, std::uint64_t begin);

}  // namespace tessera::inspect
