#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/base_checkpoint.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// How a new checkpoint stores a piece if only some rows differ from the base's piece.
enum class RowChanges {
  write_piece,  // writes the whole piece, as any piece that differs
  write_rows,   // writes only these rows (a patch), if they are few ([Note: Changed rows])
};

/// Compares each piece that a plan writes with the piece of the base that has the same tensor and
/// region ([Note: Base checkpoint]); without the patch, if that piece has one. Returns the pairs
/// with equal bytes; with `write_rows`, also the pairs with few changed rows. Compares the bytes,
/// not checksums, because someone can make different bytes with the same 64-bit checksum, and
/// because reading finds damage in the base. Stops reading a piece at the first difference; with
/// `write_rows`, when too many rows differ.
/// `rank`: compares only the pieces of this rank; empty: all. `options`: as for `execute`;
/// `progress` gets the bytes compared or skipped. Throws: what `execute` throws; Error(corruption)
/// naming file and tensor if the base is damaged. Cost: reads these pieces in source and base.
formats::PieceMatches find_equal_pieces(const Plan& plan, const formats::TensorSource& source,
                                        const formats::BaseCheckpoint& base, RowChanges row_changes,
                                        const ExecuteOptions& options,
                                        std::optional<int> rank = {});

/// A function that is called before a comparison with a base, with the bytes of all its pieces.
using ComparisonBegins = std::function<void(std::uint64_t nbytes)>;

/// Does what find_equal_pieces does, for these pairs from pair_pieces. Requires: sorted by `piece`.
formats::PieceMatches find_equal_pieces_of(const Plan& plan, const formats::TensorSource& source,
                                           const formats::BaseCheckpoint& base,
                                           std::vector<formats::PiecePair> pairs,
                                           RowChanges row_changes, const ExecuteOptions& options,
                                           const ComparisonBegins& begins = {});

/// Opens the base of a move to `destination`. Throws: as BaseCheckpoint::open and check_base.
std::shared_ptr<const formats::BaseCheckpoint> open_base_of_move(
    const FileSystem& fs, const std::string& base, const std::string& destination,
    const formats::CreateOptions& create);

/// If `create` has a journal, adds the base and `row_changes` to its identity. Then a run with
/// another base or other `row_changes` cannot resume the move, and its error names the difference.
void add_base_to_identity(const formats::BaseCheckpoint& base, RowChanges row_changes,
                          formats::CreateOptions& create);

/// Opens the base of a move and compares the move's pieces with it. Sets in `create.native.linked`
/// which pieces stay in files of the base, and returns the bytes that stay there (not those of
/// changed rows). If `create` has a journal, adds the base to its identity. If `base` is empty,
/// changes nothing and returns 0. Throws: as open_base_of_move and find_equal_pieces.
std::uint64_t link_to_base(const Plan& plan, const formats::TensorSource& source,
                           const FileSystem& fs, const std::string& base,
                           const std::string& destination, RowChanges row_changes,
                           formats::CreateOptions& create, const ExecuteOptions& options,
                           const ComparisonBegins& begins = {});

/// Returns the bytes that a move hands to its writer: those of all pieces that do not stay in files
/// of the base. A patched piece counts in full, because the writer gets all of its rows.
std::uint64_t nbytes_to_move(const Plan& plan, const formats::CreateOptions& create);

/// Which share of a comparison one worker does, if several workers (processes) compare together.
struct ComparisonShare {
  int index = 0;
  int num_shares = 1;
};

/// Does what `link_to_base` does, if several workers do one move. Each worker compares its own
/// share of the bytes, and stores the result in the folder `<destination>.partial.shares`. Then it
/// reads the results of the other shares. If one is missing, it waits while another living worker
/// compares that share; if none does, it compares the share itself. So all workers link the same
/// pieces, even if they run one after the other. Calls `begins` for each share that it compares.
/// Requires: `base` and `create.journal` are set. Throws also: Error(unsupported) without locks.
std::uint64_t link_to_base_with_others(const Plan& plan, const formats::CheckpointReader& reader,
                                       FileSystem& fs, const std::string& base,
                                       const std::string& destination, RowChanges row_changes,
                                       formats::CreateOptions& create, const ComparisonShare& share,
                                       const ExecuteOptions& options,
                                       const ComparisonBegins& begins = {});

}  // namespace tessera::reshard
