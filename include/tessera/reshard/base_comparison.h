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

/// How a new checkpoint stores a piece of which only some rows differ from the base.
enum class RowChanges {
  write_piece,  // whole, as other pieces that differ
  write_rows,   // as a patch, if the patch is small enough ([Note: Changed rows])
};

/// Compares the pieces that a plan writes with the pieces of a base that have the same tensor and
/// region. If a piece of the base has a patch, ignores the patch. Returns the pairs with equal
/// bytes; with `write_rows` also those with few changed rows. Compares the bytes themselves, not
/// checksums: different bytes can be chosen to have the same 64-bit checksum, and reading also
/// finds damage in the base. Stops reading a piece at the first difference, or when too many rows
/// differ.
/// `rank`: only the pieces of this rank. `options`: as for `execute`; `progress` gets the bytes
/// that were compared or skipped. Throws: what `execute` throws; Error(corruption) naming file and
/// tensor if the base is damaged. Cost: reads the compared part of each piece, in source and base.
formats::PieceMatches find_equal_pieces(const Plan& plan, const formats::TensorSource& source,
                                        const formats::BaseCheckpoint& base, RowChanges row_changes,
                                        const ExecuteOptions& options,
                                        std::optional<int> rank = {});

/// Called before pieces are compared with a base, with the bytes of these pieces.
using ComparisonBegins = std::function<void(std::uint64_t nbytes)>;

/// As find_equal_pieces, but only for `pairs`, from pair_pieces. Requires: sorted by piece.
formats::PieceMatches find_equal_pieces_of(const Plan& plan, const formats::TensorSource& source,
                                           const formats::BaseCheckpoint& base,
                                           std::vector<formats::PiecePair> pairs,
                                           RowChanges row_changes, const ExecuteOptions& options,
                                           const ComparisonBegins& begins = {});

/// Opens the base of a move. Throws: what BaseCheckpoint::open and check_base throw.
std::shared_ptr<const formats::BaseCheckpoint> open_base_of_move(
    const FileSystem& fs, const std::string& base, const std::string& destination,
    const formats::CreateOptions& create);

/// Adds the base to the journal's identity, if `create` has a journal. Then a run with another base
/// cannot resume the move, and its error names the option.
void add_base_to_identity(const formats::BaseCheckpoint& base, RowChanges row_changes,
                          formats::CreateOptions& create);

/// Opens the base of a move, compares the move's pieces with it, and sets in `create` which pieces
/// stay in files of the base. Returns how many bytes stay there, without changed rows. If `create`
/// has a journal, adds the base to its identity. Does nothing if `base` is empty. `options`: as for
/// find_equal_pieces. Throws: what BaseCheckpoint::open, check_base and find_equal_pieces throw.
std::uint64_t link_to_base(const Plan& plan, const formats::TensorSource& source,
                           const FileSystem& fs, const std::string& base,
                           const std::string& destination, RowChanges row_changes,
                           formats::CreateOptions& create, const ExecuteOptions& options,
                           const ComparisonBegins& begins = {});

/// Returns the bytes that a move hands to its writer: those of all pieces except linked ones. A
/// patched piece counts in full, because the writer gets all of its rows.
std::uint64_t nbytes_to_move(const Plan& plan, const formats::CreateOptions& create);

/// One of the shares of a comparison that several workers do together.
struct ComparisonShare {
  int index = 0;
  int num_shares = 1;
};

/// Does what `link_to_base` does, for one of several workers of a move. Each worker compares its
/// own share of the bytes and leaves the result in the folder of the shared work. Then it takes the
/// results of the others, and compares the shares that no living worker compares. For a share that
/// another worker is comparing, it waits. So all workers link the same pieces, even if they run one
/// after the other. Calls `begins` for each share that it compares. Requires: `base` is not empty,
/// and `create` has a journal. Throws also: what SharedWork::lock throws.
std::uint64_t link_to_base_with_others(const Plan& plan, const formats::CheckpointReader& reader,
                                       FileSystem& fs, const std::string& base,
                                       const std::string& destination, RowChanges row_changes,
                                       formats::CreateOptions& create, const ComparisonShare& share,
                                       const ExecuteOptions& options,
                                       const ComparisonBegins& begins = {});

}  // namespace tessera::reshard
