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
// on the same file system. A piece (a region of a tensor, stored in one file) that has the same
// bytes in the base is not written again: the new checkpoint's directory gets a hard link to the
// base's file that holds the piece. So each checkpoint stays whole if the other is removed, moved
// or copied, and the disk holds the bytes once. Tessera never changes the files of a checkpoint
// that has appeared, so the two cannot disturb each other.
//
// A linked file keeps all of its bytes on the disk, also those that no checkpoint uses any more. So
// the writer links a file only if the new checkpoint uses at least half of its bytes; otherwise it
// writes the pieces in that file again. The linked files of a checkpoint are therefore at most
// twice as large as its linked pieces.
namespace tessera::formats {

/// A piece of a new checkpoint, and a piece of the base with the same tensor and region.
struct PiecePair {
  CheckpointWriter::PieceId piece{};
  CheckpointWriter::PieceId base_piece{};
};

class BaseCheckpoint;

/// For each piece of a new checkpoint that is stored as a patch ([Note: Changed rows]): the rows
/// that differ from the base. If another rank writes the piece, its set may be empty.
using ChangedRows = std::map<CheckpointWriter::PieceId, RowSet>;

/// What a comparison with a base found.
struct PieceMatches {
  std::vector<PiecePair> pairs;  // of equal bytes, or with few changed rows; sorted by `piece`
  ChangedRows changed_rows;      // has each `piece` of these pairs whose bytes differ
};

/// The pieces that a new checkpoint does not write again, because files of its base hold them.
struct LinkedPieces {
  std::shared_ptr<const BaseCheckpoint> base;
  std::vector<PiecePair> pairs;  // sorted by `piece`
  ChangedRows changed_rows;      // has each of these pieces that gets a patch
  std::uint64_t nbytes = 0;      // sum of linked_nbytes_of for all these pieces
};

/// Returns how many bytes of a linked piece the new checkpoint does not write again: all, except
/// those of its changed rows. Counts bytes before compression. `contents`: of the new checkpoint.
std::uint64_t linked_nbytes_of(const LinkedPieces& linked, const CheckpointContents& contents,
                               CheckpointWriter::PieceId piece);

/// An open checkpoint with which new checkpoints can share files. Read-only and thread-safe.
class BaseCheckpoint {
 public:
  /// Opens the checkpoint at `path`, to be the base of a new checkpoint of `format`. `fs` must
  /// outlive the result.
  /// Throws:
  /// - Error(not_found) if `path` does not exist; Error(invalid_argument) if it is a URL;
  /// - Error(unsupported) if it is no checkpoint or one of another format, or if checkpoints of
  ///   `format` cannot have a base;
  /// - Error(corruption) if its index is damaged or missing, or if the checkpoint is unfinished.
  static std::shared_ptr<const BaseCheckpoint> open(const FileSystem& fs, const std::string& path,
                                                    Format format);
  virtual ~BaseCheckpoint() = default;

  /// Returns the open checkpoint.
  virtual const CheckpointReader& reader() const = 0;
  /// Returns a text that identifies the checkpoint's bytes: equal texts mean equal bytes.
  virtual std::string identity() const = 0;
  /// Returns those of `pairs` (PieceMatches::pairs) whose base file is worth a link: the pairs use
  /// at least half of its bytes. If several ranks write the checkpoint, pass all ranks' pairs.
  virtual std::vector<PiecePair> worth_linking(std::vector<PiecePair> pairs) const = 0;
  /// As TensorSource::read_piece, but ignores a patch: reads the piece that the patch changes.
  virtual void read_unpatched(CheckpointWriter::PieceId piece, FlatRange range,
                              std::span<std::byte> out) const {
    reader().read_piece(piece.tensor_index, piece.piece_index, range, out);
  }
};

/// Pairs each non-empty piece of a new checkpoint with the base's piece of the same tensor name,
/// dtype, shape, kind and region, if there is one. Compares no bytes. Sorted by `piece`.
std::vector<PiecePair> pair_pieces(const CheckpointContents& contents,
                                   const CheckpointContents& base);

/// Returns the pieces to link, given what a comparison with the base found; null if no file is
/// worth a link. `contents`: of the new checkpoint. `matches`: of all ranks, as for worth_linking.
std::shared_ptr<const LinkedPieces> link_pieces(std::shared_ptr<const BaseCheckpoint> base,
                                                const CheckpointContents& contents,
                                                PieceMatches matches);

/// Throws Error(invalid_argument) if `base`, which must exist, cannot be the base of a checkpoint
/// at `destination`: the paths are equal, one contains the other, or the file systems differ.
void check_base(const FileSystem& fs, const std::string& base, const std::string& destination);

}  // namespace tessera::formats
