#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/formats/base_checkpoint.h"

namespace tessera::reshard {

// What the ranks of a save tell each other about the pieces that equal those of the base.

/// Returns the base's identity and the pairs in `equal`, as ranges of their numbers in `pairs`.
/// Both lists are sorted by piece.
std::string equal_pieces_to_text(const formats::BaseCheckpoint& base,
                                 std::span<const formats::PiecePair> pairs,
                                 std::span<const formats::PiecePair> equal);

/// Returns the pairs that the texts of all ranks name, sorted by piece. Throws: Error(mismatch)
/// naming `path` if a rank has another base than `base`.
std::vector<formats::PiecePair> equal_pieces_from_texts(const formats::BaseCheckpoint& base,
                                                        std::span<const formats::PiecePair> pairs,
                                                        std::span<const std::string> texts,
                                                        const std::string& path);

}  // namespace tessera::reshard
