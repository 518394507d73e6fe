#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/list_of_lists.h"
#include "formats/native/file_header.h"
#include "tessera/base/error.h"
#include "tessera/formats/changed_rows.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/shared_contents.h"

namespace tessera::formats::native {

/// How a piece's bytes are stored. Stored on disk; never renumber.
enum class Encoding : std::uint8_t {
  none = 0,   // no elements, no bytes
  plain = 1,  // one range of the file
  zstd = 2,   // chunks, byte-shuffled and compressed
};

inline constexpr std::uint64_t kPlainBlockNbytes = 65536;  // plain data: bytes per checksum
inline constexpr std::uint64_t kMaxChunkNbytes = std::uint64_t{64} << 20;
/// All chunk sizes are multiples of the largest itemsize.
inline constexpr std::uint64_t kChunkNbytesUnit = 16;

// [Note: Linked files] A checkpoint of version 3 has a base: an older checkpoint that already
// stores some of its pieces, the linked pieces, with the same bytes. The new directory has hard
// links to the base's rank files with these pieces, under names that no rank file of its own has.
// So the new checkpoint stays complete if the base is removed. If a linked file of the base holds
// such pieces, the new directory links this file, too. See docs/formats/native.md.

// [Note: Patched pieces] A checkpoint of version 4 can have patched pieces ([Note: Changed rows] in
// changed_rows.h): linked pieces with changed rows. The StoredPiece says where the old piece is in
// a linked file, the StoredPatch where the new rows are in the rank's own file. See native.md.

/// The greatest number of linked files of a checkpoint.
inline constexpr std::uint32_t kMaxLinkedFiles = (1U << 24) - 1;

using PieceId = CheckpointWriter::PieceId;

/// The place of a piece's bytes in its rank file, or in a linked file.
struct StoredPiece {
  std::uint32_t position = 0;  // among the tensor's pieces in the whole checkpoint
  std::uint32_t file = 0;      // 0: the rank's own file; n: number n-1 of Index::linked_files
  Encoding encoding = Encoding::none;
  std::uint64_t begin = 0;          // offset in the file: of the data, or of the first chunk
  std::uint64_t stored_nbytes = 0;  // plain: the piece's size; zstd: the sum of its chunks
  /// If the piece has one block: the block's checksum. Otherwise: where the table of blocks begins.
  std::uint64_t checksum_or_table = 0;

  friend bool operator==(const StoredPiece&, const StoredPiece&) = default;
};

/// The places of a patch in the file of the piece's rank. `numbers` and `rows` are stored plain.
/// Their `position` and `file` have no meaning.
struct StoredPatch {
  std::uint64_t num_rows = 0;  // of the patch
  StoredPiece numbers{};       // of the changed rows in the piece, ascending, 8 bytes each
  StoredPiece rows{};          // the bytes of these rows, in the same order

  friend bool operator==(const StoredPatch&, const StoredPatch&) = default;
};

/// Returns a patch of `num_rows` rows whose places are not set yet. `rows`: of the whole piece.
StoredPatch empty_patch(std::uint64_t num_rows, const PieceRows& rows);

/// The StoredPiece of each piece of an index. A large checkpoint has millions of pieces, and most
/// of them are plain and in their rank's own file: these take 16 bytes each.
///
/// Threads may set different pieces at the same time. Call `keep_all_members` first if they set a
/// piece that is compressed or linked, or whose `position` is not its `piece_index`.
class StoredPieces {
 public:
  /// Bits of `begin`. A file with greater offsets (64 PiB) is refused.
  static constexpr int kBeginBits = 56;

  void reserve(std::size_t num_tensors, std::size_t num_pieces) {
    slots_.reserve(num_tensors, num_pieces);
  }
  /// Adds a tensor with this number of pieces.
  void add(std::size_t num_pieces);
  void shrink_to_fit() { slots_.shrink_to_fit(); }

  std::size_t num_tensors() const { return slots_.size(); }
  std::size_t num_pieces(std::size_t tensor_index) const { return slots_[tensor_index].size(); }
  /// Returns the number of pieces of all tensors.
  std::size_t num_pieces() const { return slots_.items().size(); }
  /// Returns the number of a piece among the pieces of all tensors, from 0 on.
  std::size_t number_of(PieceId id) const { return slots_.first(id.tensor_index) + id.piece_index; }

  /// Returns where a piece is stored. `nbytes`: the size of the piece before compression.
  StoredPiece get(PieceId id, std::uint64_t nbytes) const;
  std::uint32_t file_of(PieceId id) const { return rest_.empty() ? 0 : rest_[number_of(id)].file; }
  void set(PieceId id, const StoredPiece& stored);
  /// Sets the place of a piece in its rank's own file. Threads may call `file_of` for it meanwhile.
  void set_place(PieceId id, Encoding encoding, std::uint64_t begin);
  void set_checksum(PieceId id, std::uint64_t checksum) {
    slots_[id.tensor_index][id.piece_index].checksum_or_table = checksum;
  }

  /// Allocates the members that `set` needs for a piece that is compressed or linked, or whose
  /// `position` is not its `piece_index` (in the index of a rank file). Others do not need them.
  void keep_all_members();

 private:
  struct Slot {
    std::uint64_t begin : kBeginBits = 0;
    std::uint64_t encoding : 64 - kBeginBits = 0;
    std::uint64_t checksum_or_table = 0;
  };
  struct Rest {
    std::uint64_t stored_nbytes = 0;  // of a compressed piece
    std::uint32_t position = 0;
    std::uint32_t file = 0;
  };
  static_assert(sizeof(Slot) == 16);

  tessera::detail::ListOfLists<Slot> slots_;
  std::vector<Rest> rest_;  // parallel to slots_.items(); empty while no piece needs it
};

/// How a piece is cut into blocks with one checksum each: blocks of plain data, or compressed
/// chunks.
struct BlockGrid {
  std::uint64_t block_nbytes = 0;  // of each block but the last; before compression
  std::uint64_t nbytes = 0;        // of the piece, before compression

  std::uint64_t num_blocks() const { return nbytes == 0 ? 0 : (nbytes - 1) / block_nbytes + 1; }
  /// Returns the range of a block in the piece.
  ByteRange block(std::uint64_t number) const;
};

/// Returns how one part of a patch, its row numbers or its rows, is cut into blocks.
BlockGrid grid_of(const StoredPiece& part_of_patch);

/// What the index records about a rank file.
struct RankFileRecord {
  std::uint64_t nbytes = 0;
  std::uint64_t index_checksum = 0;
  std::uint64_t structure_checksum = 0;

  friend bool operator==(const RankFileRecord&, const RankFileRecord&) = default;
};

/// The index's record of a linked file: fields of its header, and the chunk size in its index.
struct LinkedFile {
  std::uint64_t checkpoint_id = 0;  // of the checkpoint for which the file was written
  std::uint32_t rank = 0;           // rank of the file in that checkpoint
  std::uint32_t world_size = 0;
  std::uint32_t format_version = kFirstVersion;
  std::uint64_t chunk_nbytes = 0;  // of its compressed pieces
  RankFileRecord record;

  std::string name() const { return linked_file_name(checkpoint_id, rank); }
  friend bool operator==(const LinkedFile&, const LinkedFile&) = default;
};

/// The binary index of one file: of `index.h5` or of a rank file.
struct Index {
  std::uint32_t format_version = kFirstVersion;  // in the header, not in the encoded index
  std::uint64_t chunk_nbytes = 0;
  bool has_virtual_datasets = false;
  SharedContents contents;
  std::vector<std::string> value_json;  // parallel to contents.values
  /// `key_order_text` of the whole checkpoint, also in a rank file's index. Stored as the
  /// kKeyOrderAnnotation; so older readers ignore it. `contents.annotations` does not have it.
  std::string key_order;
  StoredPieces storage;  // of the pieces of contents.tensors; `stored` reads it
  /// For each linked piece, where HDF5 readers find it in the linked file. If it is packed there:
  /// its first element's place in the packed dataset. Otherwise: its tensor's number in the list of
  /// that file's index, which the HDF5 link name of a tensor with a long FQN contains. For other
  /// pieces: 0. Indexed by StoredPieces::number_of; empty without linked files.
  std::vector<std::uint64_t> linked_places;
  std::map<PieceId, StoredPatch> patches;  // of the patched pieces, which are linked pieces too
  std::vector<RankFileRecord> rank_files;  // indexed by rank; empty in a rank file's index
  std::vector<LinkedFile> linked_files;  // sorted by checkpoint id and rank; the same on all ranks

  StoredPiece stored(PieceId id) const;
  BlockGrid grid(PieceId id) const;
  /// Returns the piece's item of `linked_places`; 0 without linked files.
  std::uint64_t linked_place(PieceId id) const;
  /// Returns the patch of a patched piece, or null.
  const StoredPatch* patch(PieceId id) const;
  /// Returns how a patched piece is divided into rows: how many it has, and their size.
  PieceRows rows(PieceId id) const;
};

/// Returns the size of an entry in a table of blocks. Units: bytes.
std::uint64_t table_entry_nbytes(Encoding encoding);

/// Takes the parts of an encoded index in their order.
using IndexSink = std::function<void(std::span<const std::byte>)>;

/// Passes the encoded index to `sink` in parts of about 1 MiB. Equal indexes give equal bytes.
void encode_index(const Index& index, const IndexSink& sink);
/// Returns the whole encoded index.
std::vector<std::byte> encode_index(const Index& index);

/// Does what `encode_index(select_pieces(whole, pieces), sink)` does, without a copy of the
/// contents.
void encode_rank_index(const Index& whole, std::span<const PieceId> pieces, const IndexSink& sink);

/// The size and the checksum of an encoded index.
struct EncodedIndex {
  std::uint64_t nbytes = 0;
  std::uint64_t checksum = 0;
};

/// Runs `encode`, and returns the size and the checksum of the bytes that it passes to the sink.
EncodedIndex measure_index(const std::function<void(const IndexSink&)>& encode);

/// Decodes the result of `read_index_bytes`. Checks everything that can be checked without reading
/// another part of the files. The caller may rely on: known dtypes, valid shapes, regions within
/// their tensors, ranks below the world size, byte ranges within their files (but not those of the
/// chunks in a block table). Names are sorted and unique in `index.h5`, but perhaps not in a rank
/// file. Throws: Error(corruption) naming the path and, where known, the tensor.
Index decode_index(std::span<const std::byte> bytes, const FileHeader& header,
                   const std::string& path);

/// Throws Error(kind) unless world size, regions and ranks are valid, names are sorted and unique,
/// and aliases have targets. Unless `kind` is corruption, checks shapes too: Error(corruption).
void validate_contents(const CheckpointContents& contents, ErrorKind kind, const std::string& path);

/// Returns one list of pieces for each rank, in the order of ranks. Each list is in the order of
/// the contents.
tessera::detail::ListOfLists<PieceId> pieces_by_rank(const CheckpointContents& contents);

/// Returns the index of one rank's file: `pieces` with their tensors, all tensors that have no
/// piece, and everything else but `rank_files`. Requires: `pieces` are in the order of `whole`.
Index select_pieces(const Index& whole, std::span<const PieceId> pieces);

/// Copies the places of pieces from the index of a complete rank file to `whole`. Requires:
/// `rank_index` lists `pieces`, in this order.
void take_storage(Index& whole, std::span<const PieceId> pieces, const Index& rank_index);

/// Merges the indexes of all ranks into one, without `rank_files`. Requires: `ranks` is in order of
/// the ranks and not empty, and each index was made by `select_pieces`.
/// Takes everything except tensors (values, aliases, linked files, …) from the first index, and
/// does not compare it with the others. Throws: Error(corruption) naming `path` if dtypes, shapes
/// or pieces contradict each other, or if the result is not valid.
Index merge_ranks(std::vector<Index> ranks, const std::string& path);

}  // namespace tessera::formats::native
