#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {

/// Returns the SHA-256 of each tensor as 64 hex digits, in the order of `tensor_indices`. A digest
/// covers the bytes of the whole tensor, row-major and little-endian. So it does not depend on
/// format or sharding. Throws: Error(corruption) if pieces do not cover a tensor or are damaged;
/// Error(io); Error(interrupted).
std::vector<std::string> compute_digests(const formats::CheckpointReader& reader,
                                         std::span<const std::size_t> tensor_indices,
                                         const ScanOptions& options);

/// Returns the XXH3-128 of each tensor as 32 hex digits. Each digest covers a line such as
/// `bfloat16 [2, 3]` (dtype and shape), a line break, and then the tensor's bytes, as in
/// compute_digests. Throws: as compute_digests.
std::vector<std::string> compute_content_digests(const formats::CheckpointReader& reader,
                                                 std::span<const std::size_t> tensor_indices,
                                                 const ScanOptions& options);

}  // namespace tessera::inspect
