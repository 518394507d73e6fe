#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/layout/region.h"

namespace tessera::formats::torch_zip {

/// Fills the span with the storage's bytes from `begin` on.
using StorageRead = std::function<void(std::uint64_t begin, std::span<std::byte> bytes)>;

/// Fills `out` with elements `[range.begin, range.end)` of the tensor in row-major order, for any
/// strides. Reads the storage in its own order: adjacent elements into `out`, others (with the gaps
/// of up to 16 KiB between them) into a buffer of 1 MiB. Reads no byte twice within one box of the
/// range. Requires: `out.size() == range.numel() * itemsize`.
void read_strided(const TensorRecord& tensor, FlatRange range, std::span<std::byte> out,
                  const StorageRead& read);

}  // namespace tessera::formats::torch_zip
