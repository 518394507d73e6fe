#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/changed_rows.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format.h"

// [Note: Base checkpoint] A new checkpoint can have a base: an older checkpoint of the same format
// on the same file system. A piece that has the same bytes in the base is not written again: the
// new checkpoint's directory gets a hard link to the base's file that holds this piece. So both
// checkpoints stay whole if the other one is removed, moved or copied, and the disk holds the bytes
// once. A checkpoint's files never change after it has appeared, so the two cannot disturb each
// other.
//
// A linked file keeps all of its bytes on the disk, also those that no checkpoint uses any more.
// So a file is linked only if the new checkpoint uses at least half of its bytes; otherwise these
// pieces are written again. The linked files of a checkpoint are therefore never larger than twice
// its linked pieces.
namespace tessera::formats {

/// A piece of a new checkpoint, and a piece of the base with the same tensor and region.
struct PiecePair {
  CheckpointWriter::PieceId piece{};
  CheckpointWriter::PieceId base_piece{};
};

class BaseCheckpoint;

/// For each piece of a new checkpoint that is stored as a patch ([Note: Changed rows]): its rows
/// that differ from the base. The set of a piece that another rank writes may be empty.
using ChangedRows = std::map<CheckpointWriter::PieceId, RowSet>;

/// What a comparison with a base found.
struct PieceMatches {
  std::vector<PiecePair> pairs;  // with equal bytes, or with few changed rows; sorted by `piece`
  ChangedRows changed_rows;      // of the pairs whose bytes differ
};

/// The pieces of a new checkpoint that stay in files of its base.
struct LinkedPieces {
  std::shared_ptr<const BaseCheckpoint> base;
  std::vector<PiecePair> pairs;  // sorted by `piece`
  ChangedRows changed_rows;      // of the patched ones among these pieces
  std::uint64_t nbytes = 0;      // of these pieces, less the changed rows; before compression
};

/// Returns how many bytes of a linked piece stay in a file of the base: all, except those of its
/// changed rows. Counts bytes before compression.
std::uint64_t linked_nbytes_of(const LinkedPieces& linked, const CheckpointContents& contents,
                               CheckpointWriter::PieceId piece);

/// An open checkpoint that new ones can share files with. Read-only and thread-safe.
class BaseCheckpoint {
 public:
  /// Opens the checkpoint at `path`, to be the base of a new checkpoint of `format`. `fs` must
  /// outlive the result.
  /// Throws:
  /// - Error(not_found) if there is no checkpoint; Error(invalid_argument) if `path` is a URL;
  /// - Error(unsupported) if the checkpoint has another format, or if the format does not support a
  ///   base;
  /// - Error(corruption) if its index is damaged, or if the checkpoint is unfinished.
  static std::shared_ptr<const BaseCheckpoint> open(const FileSystem& fs, const std::string& path,
                                                    Format format);
  virtual ~BaseCheckpoint() = default;

  /// Returns the open checkpoint.
  virtual const CheckpointReader& reader() const = 0;
  /// Returns a text that differs between checkpoints that differ in any byte.
  virtual std::string identity() const = 0;
  /// Returns the pairs whose files are worth a link ([Note: Base checkpoint]). `pairs`: as in
  /// PieceMatches. If several ranks write the new checkpoint, pass the pairs of all ranks.
  virtual std::vector<PiecePair> worth_linking(std::vector<PiecePair> pairs) const = 0;
  /// Reads a piece as TensorSource::read_piece does, but without its patch, if it has one.
  virtual void read_unpatched(CheckpointWriter::PieceId piece, FlatRange range,
                              std::span<std::byte> out) const {
    reader().read_piece(piece.tensor_index, piece.piece_index, range, out);
  }
};

/// Returns all non-empty pieces of a new checkpoint for which the base has a piece with the same
/// tensor name, dtype, shape, kind and region. Their bytes may differ. Sorted by `piece`.
std::vector<PiecePair> pair_pieces(const CheckpointContents& contents,
                                   const CheckpointContents& base);

/// Returns the pieces to link if the comparison found `matches`; null if no file is worth a link.
/// `matches`: as for worth_linking. `contents`: of the new checkpoint.
std::shared_ptr<const LinkedPieces> link_pieces(std::shared_ptr<const BaseCheckpoint> base,
                                                const CheckpointContents& contents,
                                                PieceMatches matches);

/// Throws Error(invalid_argument) if `base` cannot be the base of a checkpoint at `destination`:
/// the paths are equal, one contains the other, or the file systems differ. `base` must exist.
void check_base(const FileSystem& fs, const std::string& base, const std::string& destination);

}  // namespace tessera::formats
