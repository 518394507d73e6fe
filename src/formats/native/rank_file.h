#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "formats/native/chunk_codec.h"
#include "formats/native/h5_calls.h"
#include "formats/native/index.h"
#include "formats/native/patch_writer.h"
#include "formats/staging/journal.h"
#include "formats/stored_chunks.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/native.h"

namespace tessera::formats::native {

/// The index of the whole checkpoint, and the pieces that one rank's file holds, in the order of
/// the index. A piece's position in this list is its number. The writer of the file sets the places
/// of these pieces in `whole`, except for linked pieces, whose bytes are in other files. Of patched
/// pieces, it sets the places of their patches.
struct RankFileContents {
  Index& whole;
  std::span<const PieceId> pieces;
};

/// Writes one rank's file, except its header.
///
/// Without compression, the constructor lays out all datasets, and blocks may come in any order.
/// This also holds for packed pieces ([Note: Packed pieces]) and for patches. With compression, a
/// thread compresses its block and then waits for its turn: the writer lays out datasets and chunks
/// in the order of the pieces, as their sizes become known. The call that writes the last block
/// completes the file: it writes the tables and the index, and syncs. Thread-safe.
class RankFileWriter {
 public:
  /// Creates the file at `path`. If an interrupted writer left the file there, keeps its blocks.
  /// The objects that `contents` refers to must outlive the writer. `journal`: records finished
  /// blocks; may be null.
  RankFileWriter(FileSystem& fs, std::string path, RankFileContents contents,
                 const NativeWriteOptions& options, Journal* journal);

  void write_block(std::size_t piece_number, std::int64_t begin, std::span<const std::byte> bytes);

  /// Does what ChunkSink::write_chunk does. Requires: `may_compress` is true for the piece.
  bool write_chunk(std::size_t piece_number, std::int64_t begin, const StoredChunk& chunk);

  /// Checks whether the file has the block where an interrupted writer recorded it. If so, counts
  /// it as written and returns true. `room`: a buffer with the size of the plain block.
  bool resume_block(std::size_t piece_number, std::int64_t begin, const FinishedBlock& finished,
                    std::span<std::byte> room);

  /// Makes every thread that waits or will wait for its turn throw Error(interrupted).
  void abandon() noexcept;

  bool is_complete() const { return complete_; }

  // The results. Requires: the file is complete.
  const RankFileRecord& record() const { return record_; }
  ByteRange index_range() const { return index_range_; }

 private:
  struct StoredBlock {
    ByteRange range;  // of the file
    std::uint64_t checksum = 0;
  };
  /// How a piece is written. Computed at each use: a file may have millions of packed pieces.
  struct PieceWriting {
    PieceId id{};
    std::uint64_t nbytes = 0;
    bool is_packed = false;
    bool is_patched = false;
    bool may_compress = false;
    std::int64_t block_numel = 0;  // elements of a block; 0: nothing to write
  };
  /// What a piece with a dataset of its own needs.
  struct OwnDataset {
    std::size_t piece_number = 0;
    std::size_t tensor_number = 0;      // the tensor's number in the file's index
    h5::Handle handle{};                // set while chunks are written to the dataset
    std::vector<StoredBlock> blocks{};  // for plain data, their ranges are not set
  };

  /// What the patch of a piece needs.
  struct OwnPatch {
    std::size_t piece_number;
    std::size_t tensor_number;  // the tensor's number in the file's index
    PatchWriter writer;
  };

  /// A block to be written: its plain bytes, its encoded chunk, or both.
  struct Block {
    std::span<const std::byte> bytes{};
    EncodedChunk chunk{};
    std::uint64_t chunk_checksum = 0;
    std::optional<ByteRange> place{};  // where an interrupted run wrote the block
  };

  PieceWriting piece(std::size_t number) const;
  const TensorEntry& tensor_of(PieceId id) const;
  const Region& region_of(PieceId id) const;
  std::string link_name_of(std::size_t piece_number, std::size_t tensor_number) const;
  OwnDataset& own_dataset_of(std::size_t piece_number);
  OwnPatch& own_patch_of(std::size_t piece_number);
  StoredPatch& stored_patch_of(const OwnPatch& own);

  void list_own_datasets();
  void lay_out_packed();
  void lay_out_patch(OwnPatch& own);
  void lay_out_plain(OwnDataset& own);
  void lay_out_zstd(OwnDataset& own);
  void describe(PieceId id, const h5::Handle& dataset);
  ByteRange plain_range(PieceId id, std::int64_t begin, std::size_t nbytes) const;
  void put_patch(std::size_t piece_number, std::int64_t begin, std::span<const std::byte> bytes);
  bool resume_patch(std::size_t piece_number, std::int64_t begin, const FinishedBlock& finished);
  void put_plain(std::size_t piece_number, std::int64_t begin, const Block& block);
  bool put_in_turn(std::size_t piece_number, std::int64_t begin, const Block& block);
  void put_chunk(std::size_t piece_number, std::int64_t begin, const Block& block, ByteRange range);
  Block encode(std::size_t piece_number, std::span<const std::byte> bytes);
  void note(std::size_t piece_number, std::int64_t begin, const FinishedBlock& block);
  void count_off();
  void skip_pieces_without_dataset();
  void reserve(std::uint64_t end);
  void complete();
  std::uint64_t settle_storage();
  std::uint64_t settle_patches(std::uint64_t tables_nbytes);
  void move_tables(std::uint64_t begin);
  void write_block_tables(ByteRange range);
  std::vector<ByteRange> data_ranges();

  FileSystem& fs_;
  const std::string path_;
  const NativeWriteOptions options_;
  Journal* const journal_;
  const RankFileContents contents_;
  std::uint64_t reserved_end_ = 0;  // of the space that this or an interrupted writer reserved
  h5::File h5_file_;
  h5::Handle own_group_;                  // in the file; set once it is needed
  std::vector<OwnDataset> own_datasets_;  // in the file, in the order of their pieces

  std::vector<std::unique_ptr<OwnPatch>> own_patches_;  // in the order of their pieces

  bool is_streamed_ = false;  // written without the page cache, into reserved space

  // Whose turn it is: the next piece to lay out, and its next chunk.
  std::mutex turn_mutex_;
  std::condition_variable turn_changed_;
  std::size_t next_piece_ = 0;
  std::int64_t next_begin_ = 0;
  bool abandoned_ = false;

  std::atomic<std::int64_t> num_blocks_left_ = 0;
  std::atomic<bool> complete_ = false;
  RankFileRecord record_;
  ByteRange index_range_;
};

/// Returns whether a writer with these options tries to compress a piece of this size.
bool may_compress(std::uint64_t piece_nbytes, const NativeWriteOptions& options);

/// Returns how many elements of a piece a writer with these options takes in one block.
std::int64_t block_numel_of(std::int64_t piece_numel, std::uint64_t itemsize,
                            const NativeWriteOptions& options);

/// Writes the header of a file whose data has been written, and syncs the file.
void write_header(FileSystem& fs, const std::string& path, const FileHeader& header);

}  // namespace tessera::formats::native
