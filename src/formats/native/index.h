#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/native/file_header.h"
#include "tessera/base/byte_range.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::native {

/// How a piece's bytes are stored. Stored on disk; never renumber.
enum class Encoding : std::uint8_t {
  none = 0,   // no elements, no bytes
  plain = 1,  // one range of the file
  zstd = 2,   // chunks, byte-shuffled and compressed
};

inline constexpr std::uint64_t kPlainBlockNbytes = 65536;  // of plain data under one checksum
inline constexpr std::uint64_t kMaxChunkNbytes = std::uint64_t{64} << 20;
inline constexpr std::uint64_t kChunkNbytesUnit = 16;  // the largest itemsize

/// Where a piece's bytes lie in its rank file.
struct StoredPiece {
  std::uint32_t position = 0;  // among the tensor's pieces in the whole checkpoint
  Encoding encoding = Encoding::none;
  std::uint64_t begin = 0;  // plain: of the data; zstd: of the first chunk
  std::uint64_t stored_nbytes = 0;
  std::uint64_t checksum = 0;     // of the only block
  std::uint64_t table_begin = 0;  // of the table of blocks, where there are several

  friend bool operator==(const StoredPiece&, const StoredPiece&) = default;
};

/// How a piece is cut into what is under one checksum: blocks of plain data, chunks of compressed.
struct BlockGrid {
  std::uint64_t block_nbytes = 0;  // of all but the last; before compression
  std::uint64_t nbytes = 0;        // of the piece, before compression

  std::uint64_t num_blocks() const { return nbytes == 0 ? 0 : (nbytes - 1) / block_nbytes + 1; }
  /// Returns the bytes of the piece that lie in a block.
  ByteRange block(std::uint64_t number) const;
};

/// What the index knows of a rank file.
struct RankFileRecord {
  std::uint64_t nbytes = 0;
  std::uint64_t index_checksum = 0;
  std::uint64_t structure_checksum = 0;

  friend bool operator==(const RankFileRecord&, const RankFileRecord&) = default;
};

/// The binary index of one file: of `index.h5` or of a rank file.
struct Index {
  std::uint64_t chunk_nbytes = 0;
  bool has_virtual_datasets = false;
  CheckpointContents contents;
  std::vector<std::string> value_json;            // parallel to contents.values
  std::vector<std::vector<StoredPiece>> storage;  // [tensor][piece], parallel to contents.tensors
  std::vector<RankFileRecord> rank_files;         // by rank; empty in a rank file's index

  BlockGrid grid(std::size_t tensor_index, std::size_t piece_index) const;
};

/// Returns the bytes of one entry in the table of blocks, and of a table.
std::uint64_t table_entry_nbytes(Encoding encoding);

/// Returns the index's encoding, the same for equal indexes.
std::vector<std::byte> encode_index(const Index& index);

/// Decodes what `read_index_bytes` returned. Everything that can be wrong without reading further
/// is checked, so that the caller may rely on: sorted and unique names, known dtypes, sound shapes,
/// regions within their tensors, ranks below the world size, byte ranges within the rank file.
/// Throws: Error(corruption) naming the path and, where known, the tensor.
Index decode_index(std::span<const std::byte> bytes, const FileHeader& header,
                   const std::string& path);

/// Throws Error of that kind unless names are sorted and unique, aliases have targets, regions lie
/// within their tensors, ranks below the world size.
void validate_contents(const CheckpointContents& contents, ErrorKind kind, const std::string& path);

/// Returns the pieces of each rank, by rank, in the order of the contents.
std::vector<std::vector<CheckpointWriter::PieceId>> pieces_by_rank(
    const CheckpointContents& contents);

/// Returns what belongs into one rank's file: the given pieces with their tensors, tensors that
/// have no pieces at all, and all that is no tensor.
Index select_pieces(const Index& whole, std::span<const CheckpointWriter::PieceId> pieces);

/// Takes over where the pieces of a complete rank file lie: `pieces` are that rank's, of which
/// `select_pieces` made `rank_index`.
void take_storage(Index& whole, std::span<const CheckpointWriter::PieceId> pieces,
                  const Index& rank_index);

/// Puts the ranks' indexes together: one per rank, in order, each as `select_pieces` made it.
/// Throws: Error(corruption) naming `path` where they contradict each other.
Index merge_ranks(std::vector<Index> ranks, const std::string& path);

}  // namespace tessera::formats::native
