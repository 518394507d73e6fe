#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::fuzz {

/// Reads the first and the last elements of the first 64 pieces, and the first 64 values; ignores
/// an Error from these reads. Then verifies the checkpoint, which may throw Error.
inline void read_everything(const formats::CheckpointReader& reader) {
  constexpr std::int64_t kMaxNumel = 4096;
  constexpr std::size_t kMaxPieces = 64;
  const formats::CheckpointContents& contents = reader.contents();
  std::size_t num_pieces = 0;
  std::vector<std::byte> bytes;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const formats::TensorEntry& tensor = contents.tensors[t];
    for (std::size_t p = 0; p < tensor.pieces.size() && num_pieces < kMaxPieces;
         ++p, ++num_pieces) {
      const std::int64_t numel = numel_of(tensor.pieces[p].region);
      const std::int64_t wanted = std::min(numel, kMaxNumel);
      for (const FlatRange range : {FlatRange{0, wanted}, FlatRange{numel - wanted, numel}}) {
        try {
          bytes.resize(static_cast<std::size_t>(wanted) * itemsize(tensor.meta.dtype));
          reader.read_piece(t, p, range, bytes);
          static_cast<void>(reader.piece_storage(t, p));
        } catch (const Error&) {
        }
      }
    }
  }
  for (std::size_t v = 0; v < std::min(contents.values.size(), kMaxPieces); ++v) {
    try {
      static_cast<void>(reader.read_value(v));
    } catch (const Error&) {
    }
  }
  reader.verify([](const formats::Finding&) {}, [](std::uint64_t) {});
}

}  // namespace tessera::fuzz
