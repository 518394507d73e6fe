#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/formats/base_checkpoint.h"

namespace tessera::reshard {

// The text by which a rank of a save tells the others which of its pieces equal pieces of the base.

/// Returns a text with the base's identity and, for each pair in `equal`, its index in `pairs`.
/// Indices that follow each other are written as a range. Requires: both lists are sorted by piece.
std::string equal_pieces_to_text(const formats::BaseCheckpoint& base,
                                 std::span<const formats::PiecePair> pairs,
                                 std::span<const formats::PiecePair> equal);

/// Returns the pairs that the texts of all ranks name, sorted by piece. Throws: Error(mismatch)
/// with `path` if a rank has another base than `base`.
std::vector<formats::PiecePair> equal_pieces_from_texts(const formats::BaseCheckpoint& base,
                                                        std::span<const formats::PiecePair> pairs,
                                                        std::span<const std::string> texts,
                                                        const std::string& path);

}  // namespace tessera::reshard
