#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/formats/base_checkpoint.h"

namespace tessera::reshard {

// The text by which a rank of a save, or a worker of a move, tells the others which of its pieces
// can stay in files of the base:
//
//     IDENTITY 0-4 7-9 12:3+1,20+2 ...
//
// The identity is the base's. A pair is a new piece and the base's piece of that region. `0-4` are
// pairs 0 to 3 in the list of all pairs: their bytes are equal. `12:` is a pair with changed rows,
// in runs: `20+2` are two rows, 20 rows after the end of the run before. Ranks leave out the runs.

/// Whether the text says which rows have changed, or only that rows have changed.
enum class RowsInText { leave_out, say };

/// Returns the text for `matches`. Requires: `pairs` is sorted by piece.
std::string equal_pieces_to_text(const formats::BaseCheckpoint& base,
                                 std::span<const formats::PiecePair> pairs,
                                 const formats::PieceMatches& matches, RowsInText rows_in_text);

/// Returns all matches that at least one text names (one text per rank or worker). A piece whose
/// changed rows its text omits gets an empty set. `contents`: of the new checkpoint. Throws:
/// Error(mismatch) with `path` if a text was made with another base, or does not fit `pairs`.
formats::PieceMatches equal_pieces_from_texts(const formats::BaseCheckpoint& base,
                                              const formats::CheckpointContents& contents,
                                              std::span<const formats::PiecePair> pairs,
                                              std::span<const std::string> texts,
                                              const std::string& path);

}  // namespace tessera::reshard
