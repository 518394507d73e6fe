#pragma once

#include <cstdint>
#include <variant>

#include "base/list_pool.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns a number for a piece; equal pieces have equal numbers.
struct PieceHash {
  std::uint64_t operator()(const Piece& piece) const {
    std::uint64_t hash = static_cast<std::uint64_t>(piece.rank);
    const auto add = [&](std::int64_t number) {
      hash = tessera::detail::mix_hash(hash, static_cast<std::uint64_t>(number));
    };
    if (const Box* const box = std::get_if<Box>(&piece.region)) {
      for (const std::int64_t offset : box->offsets) add(offset);
      for (const std::int64_t size : box->sizes) add(size);
    } else {
      const FlatRange& range = std::get<FlatRange>(piece.region);
      add(range.begin);
      add(range.end);
    }
    return hash;
  }
};

/// Makes tensors with equal pieces share one list of them.
using PiecePool = tessera::detail::ListPool<Piece, PieceHash>;

}  // namespace tessera::formats
