#include "formats/native/rank_file.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/checked_math.h"
#include "base/digest.h"
#include "formats/native/byte_stream.h"
#include "formats/native/chunk_codec.h"
#include "formats/native/link_name.h"
#include "formats/native/packed_pieces.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

constexpr std::uint64_t kMinCompressedNbytes = 65536;

// Files with at least this much data are written without the page cache.
constexpr std::uint64_t kMinStreamedNbytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kReservedNbytes = std::uint64_t{64} << 20;

/// Returns the size of the file that an interrupted writer left at `path`; 0 if there is no such
/// file. Units: bytes.
std::uint64_t nbytes_begun(const FileSystem& fs, const std::string& path, const Journal* journal) {
  const bool may_be_begun = journal != nullptr && journal->is_resumed();
  return may_be_begun && fs.kind_of(path) ? fs.open(path)->nbytes() : 0;
}

/// Returns the checksums that the table of blocks has for the bytes of a plain piece: one checksum
/// for each kPlainBlockNbytes.
std::vector<std::uint64_t> block_checksums(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> checksums;
  while (!bytes.empty()) {
    const auto block = bytes.first(std::min<std::size_t>(bytes.size(), kPlainBlockNbytes));
    checksums.push_back(xxh3_64(block));
    bytes = bytes.subspan(block.size());
  }
  return checksums;
}

/// Returns the checksum that a journal stores for a block of plain bytes: the checksum of the
/// block's checksums in the table.
std::uint64_t checksum_of_checksums(const std::vector<std::uint64_t>& checksums) {
  return xxh3_64(std::as_bytes(std::span(checksums)));
}

}  // namespace

bool may_compress(std::uint64_t piece_nbytes, const NativeWriteOptions& options) {
  return options.compression == NativeWriteOptions::Compression::zstd &&
         piece_nbytes >= kMinCompressedNbytes;
}

std::int64_t block_numel_of(std::int64_t piece_numel, std::uint64_t itemsize,
                            const NativeWriteOptions& options) {
  const std::uint64_t piece_nbytes = static_cast<std::uint64_t>(piece_numel) * itemsize;
  const std::uint64_t block_nbytes =
      may_compress(piece_nbytes, options) ? options.chunk_nbytes : options.plain_block_nbytes;
  return static_cast<std::int64_t>(std::min(block_nbytes, piece_nbytes) / itemsize);
}

void write_header(FileSystem& fs, const std::string& path, const FileHeader& header) {
  const auto file = fs.open_for_update(path);
  file->write_at(0, encode_header(header));
  file->sync();
  file->close();
}

RankFileWriter::RankFileWriter(FileSystem& fs, std::string path, RankFileContents contents,
                               const NativeWriteOptions& options, Journal* journal)
    : fs_(fs),
      path_(std::move(path)),
      options_(options),
      journal_(journal),
      contents_(contents),
      reserved_end_(nbytes_begun(fs_, path_, journal_)),
      h5_file_(h5::create_file(fs, path_, kHeaderNbytes)) {
  list_pieces();
  std::uint64_t data_nbytes = 0;
  for (const PieceState& piece : pieces_) {
    if (piece.block_numel > 0) data_nbytes += nbytes_of(piece);
  }
  is_streamed_ = data_nbytes >= kMinStreamedNbytes;
  if (is_streamed_) h5_file_.bytes().bypass_cache();
  lay_out_packed();
  if (options_.compression == NativeWriteOptions::Compression::none) {
    for (PieceState& piece : pieces_) lay_out_plain(piece);
    const auto ranges = data_ranges();
    if (!ranges.empty()) reserve(ranges.back().end);
  }
  skip_pieces_without_dataset();
  if (num_blocks_left_ == 0) complete();
}

/// Fills `pieces_` and `own_datasets_`. The file's index lists the tensors of the file's pieces,
/// and the tensors that have no piece on any rank.
void RankFileWriter::list_pieces() {
  const std::vector<TensorEntry>& tensors = contents_.whole.contents->tensors;
  pieces_.reserve(contents_.pieces.size());
  std::size_t num_tensors = 0;
  std::size_t next = 0;  // tensor
  for (const IndexedPiece id : contents_.pieces) {
    for (; next <= id.tensor_index; ++next) {
      if (next == id.tensor_index || tensors[next].pieces.empty()) ++num_tensors;
    }
    add_piece(id, num_tensors - 1);
  }
}

void RankFileWriter::add_piece(IndexedPiece id, std::size_t tensor_number) {
  PieceState& piece = pieces_.emplace_back();
  piece.id = id;
  stored_of(piece).position = id.piece_index;
  const std::uint64_t nbytes = nbytes_of(piece);
  if (nbytes == 0 || stored_of(piece).file != 0) return;  // linked: its bytes are in another file
  const std::uint64_t element_nbytes = itemsize(tensor_of(piece).meta.dtype);
  const auto numel = static_cast<std::int64_t>(nbytes / element_nbytes);
  piece.is_packed = is_packed(contents_.whole.format_version, nbytes);
  piece.may_compress = may_compress(nbytes, options_);
  piece.block_numel = block_numel_of(numel, element_nbytes, options_);
  num_blocks_left_ += ceil_div(numel, piece.block_numel);
  if (piece.is_packed) return;
  piece.own_dataset = static_cast<std::uint32_t>(own_datasets_.size());
  own_datasets_.push_back({.tensor_number = tensor_number});
}

const TensorEntry& RankFileWriter::tensor_of(const PieceState& piece) const {
  return contents_.whole.contents->tensors[piece.id.tensor_index];
}

const Region& RankFileWriter::region_of(const PieceState& piece) const {
  return tensor_of(piece).pieces[piece.id.piece_index].region;
}

StoredPiece& RankFileWriter::stored_of(const PieceState& piece) const {
  return contents_.whole.storage[piece.id.tensor_index][piece.id.piece_index];
}

std::uint64_t RankFileWriter::nbytes_of(const PieceState& piece) const {
  return tessera::nbytes_of(region_of(piece), tensor_of(piece).meta.dtype);
}

std::string RankFileWriter::link_name_of(const PieceState& piece) const {
  return piece_link_name(tensor_of(piece).meta.fqn, own_datasets_[piece.own_dataset].tensor_number,
                         region_of(piece));
}

/// Creates one dataset for the packed pieces of each dtype, and sets the place of each packed
/// piece.
void RankFileWriter::lay_out_packed() {
  PackedNumels numels;
  for (PieceState& piece : pieces_) {
    if (!piece.is_packed) continue;
    const DType dtype = tensor_of(piece).meta.dtype;
    StoredPiece& stored = stored_of(piece);
    stored.encoding = Encoding::plain;
    stored.stored_nbytes = nbytes_of(piece);
    const auto numel = static_cast<std::int64_t>(stored.stored_nbytes / itemsize(dtype));
    // Relative to the start of the dataset, because the place of the dataset in the file is not
    // known yet.
    stored.begin = static_cast<std::uint64_t>(numels.add(dtype, numel)) * itemsize(dtype);
  }
  std::array<std::uint64_t, kNumDTypes> begins{};
  for (int code = 0; code < kNumDTypes; ++code) {
    const auto dtype = static_cast<DType>(code);
    if (numels.of(dtype) == 0) continue;
    if (!own_group_) own_group_ = h5::create_group(h5_file_, kOwnGroup);
    const h5::PlainDataset dataset = h5::create_plain_dataset(
        h5_file_, own_group_.id(), packed_dataset_name(dtype), dtype, numels.of(dtype));
    h5::write_attribute(h5_file_, dataset.handle, "dtype", dtype_name(dtype));
    begins[static_cast<std::size_t>(code)] = dataset.range.begin;
  }
  for (PieceState& piece : pieces_) {
    if (!piece.is_packed) continue;
    stored_of(piece).begin += begins[static_cast<std::size_t>(tensor_of(piece).meta.dtype)];
  }
}

void RankFileWriter::lay_out_plain(PieceState& piece) {
  const std::uint64_t nbytes = nbytes_of(piece);
  if (!piece.has_own_dataset()) return;
  const DType dtype = tensor_of(piece).meta.dtype;
  const h5::PlainDataset dataset =
      h5::create_plain_dataset(h5_file_, h5_file_.handle.id(), link_name_of(piece), dtype,
                               static_cast<std::int64_t>(nbytes / itemsize(dtype)));
  describe(piece, dataset.handle);
  StoredPiece& stored = stored_of(piece);
  stored.encoding = Encoding::plain;
  stored.begin = dataset.range.begin;
  stored.stored_nbytes = nbytes;
  own_dataset_of(piece).blocks.resize((nbytes - 1) / kPlainBlockNbytes + 1);
}

void RankFileWriter::lay_out_zstd(PieceState& piece) {
  const DType dtype = tensor_of(piece).meta.dtype;
  const auto numel = static_cast<std::int64_t>(nbytes_of(piece) / itemsize(dtype));
  h5::Handle& dataset = own_dataset_of(piece).handle;
  dataset = h5::create_zstd_dataset(h5_file_, link_name_of(piece), dtype, numel, piece.block_numel);
  describe(piece, dataset);
  stored_of(piece).encoding = Encoding::zstd;
}

void RankFileWriter::describe(const PieceState& piece, const h5::Handle& dataset) {
  const TensorEntry& tensor = tensor_of(piece);
  h5::write_attribute(h5_file_, dataset, "fqn", tensor.meta.fqn);
  h5::write_attribute(h5_file_, dataset, "dtype", dtype_name(tensor.meta.dtype));
  h5::write_attribute(h5_file_, dataset, "shape", tensor.meta.shape);
  h5::write_attribute(h5_file_, dataset, "region", region_to_string(region_of(piece)));
  h5::write_attribute(h5_file_, dataset, "kind", state_kind_name(tensor.kind));
}

void RankFileWriter::write_block(std::size_t piece_number, std::int64_t begin,
                                 std::span<const std::byte> bytes) {
  const PieceState& piece = pieces_[piece_number];
  const std::uint64_t element_nbytes = itemsize(tensor_of(piece).meta.dtype);
  const std::uint64_t begin_nbytes = static_cast<std::uint64_t>(begin) * element_nbytes;
  TESSERA_CHECK(
      piece.block_numel > 0 && begin % piece.block_numel == 0 && begin_nbytes < nbytes_of(piece) &&
      bytes.size() == std::min(static_cast<std::uint64_t>(piece.block_numel) * element_nbytes,
                               nbytes_of(piece) - begin_nbytes));
  if (options_.compression == NativeWriteOptions::Compression::none || piece.is_packed) {
    put_plain(piece_number, begin, {.bytes = bytes});
  } else {
    const bool is_taken = put_in_turn(piece_number, begin, encode(piece_number, bytes));
    TESSERA_CHECK(is_taken);
  }
  count_off();
}

bool RankFileWriter::write_chunk(std::size_t piece_number, std::int64_t begin,
                                 const StoredChunk& chunk) {
  const PieceState& piece = pieces_[piece_number];
  TESSERA_CHECK(piece.may_compress && begin % piece.block_numel == 0);
  if (piece.is_packed) return false;
  const Block block{
      .chunk = {chunk.is_raw ? h5::ChunkForm::raw : h5::ChunkForm::filtered, chunk.bytes},
      .chunk_checksum = chunk.checksum};
  if (!put_in_turn(piece_number, begin, block)) return false;
  count_off();
  return true;
}

bool RankFileWriter::resume_block(std::size_t piece_number, std::int64_t begin,
                                  const FinishedBlock& finished, std::span<std::byte> room) {
  thread_local std::vector<std::byte> chunk;
  Block block{.place = finished.range};
  const bool is_compressed = options_.compression == NativeWriteOptions::Compression::zstd &&
                             !pieces_[piece_number].is_packed;
  if (finished.form == BlockForm::plain) {
    // Without compression, a block has one fixed range in the file. If the journal names another
    // range, the block is written again. With compression, the range may differ from run to run.
    if (!is_compressed &&
        finished.range != plain_range(pieces_[piece_number], begin, room.size())) {
      return false;
    }
    if (!journal_->read_back(path_, finished.range, room) ||
        checksum_of_checksums(block_checksums(room)) != finished.checksum) {
      return false;
    }
    block.bytes = room;
  } else {
    if (finished.range.nbytes() > options_.chunk_nbytes) return false;
    chunk.resize(finished.range.nbytes());
    if (!journal_->read_back(path_, finished.range, chunk) || xxh3_64(chunk) != finished.checksum) {
      return false;
    }
    const bool is_raw = finished.form == BlockForm::raw_chunk;
    block.chunk = {is_raw ? h5::ChunkForm::raw : h5::ChunkForm::filtered, chunk};
    block.chunk_checksum = finished.checksum;
  }
  if (is_compressed) {
    if (!put_in_turn(piece_number, begin, block)) return false;
  } else if (finished.form == BlockForm::plain) {
    put_plain(piece_number, begin, block);
  } else {
    return false;
  }
  count_off();
  return true;
}

void RankFileWriter::count_off() {
  if (num_blocks_left_.fetch_sub(1) == 1) complete();
}

void RankFileWriter::note(std::size_t piece_number, std::int64_t begin,
                          const FinishedBlock& block) {
  if (journal_ != nullptr) {
    journal_->note({contents_.pieces[piece_number], begin}, block);
  }
}

/// Returns the place in the file of `nbytes` bytes of a piece that begin at its element `begin`.
/// Requires: the piece is stored plain.
ByteRange RankFileWriter::plain_range(const PieceState& piece, std::int64_t begin,
                                      std::size_t nbytes) {
  const std::uint64_t offset = stored_of(piece).begin + static_cast<std::uint64_t>(begin) *
                                                            itemsize(tensor_of(piece).meta.dtype);
  return {offset, offset + nbytes};
}

/// Writes the block and records its checksums. Skips the write if the bytes are already at their
/// place. Requires: the piece is stored plain.
void RankFileWriter::put_plain(std::size_t piece_number, std::int64_t begin, const Block& block) {
  PieceState& piece = pieces_[piece_number];
  const std::uint64_t begin_nbytes =
      static_cast<std::uint64_t>(begin) * itemsize(tensor_of(piece).meta.dtype);
  const ByteRange range = plain_range(piece, begin, block.bytes.size());
  if (block.place != range) h5_file_.bytes().write_at(range.begin, block.bytes);
  const std::vector<std::uint64_t> checksums = block_checksums(block.bytes);
  if (piece.is_packed) stored_of(piece).checksum_or_table = checksums.front();
  for (std::size_t i = 0; i < checksums.size() && !piece.is_packed; ++i) {
    own_dataset_of(piece).blocks[begin_nbytes / kPlainBlockNbytes + i].checksum = checksums[i];
  }
  if (block.place != range) {
    note(piece_number, begin, {.range = range, .checksum = checksum_of_checksums(checksums)});
  }
}

/// Compresses a block into its chunk, and returns both. Leaves out the chunk if it is already known
/// that the piece is stored plain.
RankFileWriter::Block RankFileWriter::encode(std::size_t piece_number,
                                             std::span<const std::byte> bytes) {
  thread_local ChunkEncoder encoder;
  const PieceState& piece = pieces_[piece_number];
  Block block{.bytes = bytes};
  {
    const std::lock_guard lock(turn_mutex_);
    const bool is_laid_out_plain = next_piece_ > piece_number;
    if (!piece.may_compress || is_laid_out_plain) return block;
  }
  const std::uint64_t element_nbytes = itemsize(tensor_of(piece).meta.dtype);
  block.chunk = encoder.encode(bytes, element_nbytes,
                               static_cast<std::uint64_t>(piece.block_numel) * element_nbytes,
                               options_.zstd_level);
  block.chunk_checksum = xxh3_64(block.chunk.stored);
  return block;
}

/// Waits for the block's turn and writes the block. A piece is stored either plain or as chunks. If
/// the block does not have the bytes in that form, returns false and writes nothing.
bool RankFileWriter::put_in_turn(std::size_t piece_number, std::int64_t begin, const Block& block) {
  PieceState& piece = pieces_[piece_number];
  const std::uint64_t element_nbytes = itemsize(tensor_of(piece).meta.dtype);
  const auto is_laid_out_plain = [&] { return next_piece_ > piece_number; };
  const bool has_chunk = !block.chunk.stored.empty();

  std::unique_lock lock(turn_mutex_);
  turn_changed_.wait(lock, [&] {
    return abandoned_ || is_laid_out_plain() ||
           (next_piece_ == piece_number && next_begin_ == begin);
  });
  if (abandoned_) throw Error(ErrorKind::interrupted, {.path = path_}, "writing was abandoned");

  if (!is_laid_out_plain() && begin == 0) {
    if (has_chunk && block.chunk.form == h5::ChunkForm::filtered) {
      lay_out_zstd(piece);
    } else if (!block.bytes.empty()) {
      lay_out_plain(piece);
    } else {
      return false;
    }
  }
  const auto pass_on_to_next_piece = [&] {
    ++next_piece_;
    skip_pieces_without_dataset();
    next_begin_ = 0;
    turn_changed_.notify_all();
  };
  if (stored_of(piece).encoding == Encoding::plain) {
    if (block.bytes.empty()) return false;
    if (!is_laid_out_plain()) pass_on_to_next_piece();
    lock.unlock();
    put_plain(piece_number, begin, block);
    return true;
  }
  if (!has_chunk) return false;
  OwnDataset& dataset = own_dataset_of(piece);
  const ByteRange range =
      h5::place_chunk(h5_file_, dataset.handle, begin, block.chunk.form, block.chunk.stored);
  reserve(range.end);
  dataset.blocks.push_back({range, block.chunk_checksum});
  next_begin_ += piece.block_numel;
  if (static_cast<std::uint64_t>(next_begin_) * element_nbytes >= nbytes_of(piece)) {
    dataset.handle.reset();
    pass_on_to_next_piece();
  } else {
    turn_changed_.notify_all();
  }
  lock.unlock();
  if (block.place != range) put_chunk(piece_number, begin, block, range);
  return true;
}

void RankFileWriter::put_chunk(std::size_t piece_number, std::int64_t begin, const Block& block,
                               ByteRange range) {
  h5_file_.bytes().write_at(range.begin, block.chunk.stored);
  const bool is_raw = block.chunk.form == h5::ChunkForm::raw;
  note(piece_number, begin,
       {.range = range,
        .form = is_raw ? BlockForm::raw_chunk : BlockForm::filtered_chunk,
        .checksum = block.chunk_checksum});
}

void RankFileWriter::reserve(std::uint64_t end) {
  if (!is_streamed_ || end <= reserved_end_) return;
  // Without compression, `end` is the end of all data. With compression that end is not known yet,
  // so more is reserved, and HDF5 cuts off the rest later.
  const bool is_last = options_.compression == NativeWriteOptions::Compression::none;
  reserved_end_ = is_last ? end : end + kReservedNbytes;
  h5_file_.bytes().resize(reserved_end_);
}

void RankFileWriter::skip_pieces_without_dataset() {
  while (next_piece_ < pieces_.size() && !pieces_[next_piece_].has_own_dataset()) ++next_piece_;
}

void RankFileWriter::abandon() noexcept {
  const std::lock_guard lock(turn_mutex_);
  abandoned_ = true;
  turn_changed_.notify_all();
}

void RankFileWriter::complete() {
  const std::uint64_t tables_nbytes = settle_storage();
  ByteRange tables_range;
  const auto encode = [&](const IndexSink& sink) {
    encode_rank_index(contents_.whole, contents_.pieces, sink);
  };
  EncodedIndex encoded;
  {
    const h5::Handle group =
        own_group_ ? std::move(own_group_) : h5::create_group(h5_file_, kOwnGroup);
    if (tables_nbytes > 0) {
      tables_range = h5::create_plain_dataset(h5_file_, group.id(), kBlocksDataset, DType::uint8,
                                              static_cast<std::int64_t>(tables_nbytes))
                         .range;
    }
    for (const PieceState& piece : pieces_) {
      if (!piece.has_own_dataset()) continue;
      if (own_dataset_of(piece).blocks.size() > 1)
        stored_of(piece).checksum_or_table += tables_range.begin;
    }
    encoded = measure_index(encode);
    index_range_ = h5::create_plain_dataset(h5_file_, group.id(), kIndexDataset, DType::uint8,
                                            static_cast<std::int64_t>(encoded.nbytes))
                       .range;
  }
  h5::close_file(h5_file_);

  if (tables_nbytes > 0) write_block_tables(tables_range);
  std::uint64_t index_begin = index_range_.begin;
  encode([&](std::span<const std::byte> part) {
    h5_file_.bytes().write_at(index_begin, part);
    index_begin += part.size();
  });

  const auto written = fs_.open(path_);
  record_.nbytes = written->nbytes();
  record_.index_checksum = encoded.checksum;
  record_.structure_checksum = structure_checksum(*written, data_ranges());
  h5_file_.bytes().sync();
  h5_file_.bytes().close();
  // Frees memory for the next file.
  pieces_ = std::vector<PieceState>();
  own_datasets_ = std::vector<OwnDataset>();
  complete_ = true;
}

/// Sets the StoredPiece of each piece from its blocks. Places of tables are relative to the start
/// of the first table, because its place in the file is not known yet. Returns the size of all
/// tables. Units: bytes.
std::uint64_t RankFileWriter::settle_storage() {
  std::uint64_t tables_nbytes = 0;
  for (const PieceState& piece : pieces_) {
    if (!piece.has_own_dataset()) continue;
    StoredPiece& stored = stored_of(piece);
    const std::vector<StoredBlock>& blocks = own_dataset_of(piece).blocks;
    if (stored.encoding == Encoding::zstd) {
      stored.begin = blocks.front().range.begin;
      stored.stored_nbytes = 0;
      for (const StoredBlock& block : blocks) stored.stored_nbytes += block.range.nbytes();
    }
    if (blocks.size() == 1) {
      stored.checksum_or_table = blocks.front().checksum;
    } else {
      stored.checksum_or_table = tables_nbytes;
      tables_nbytes += blocks.size() * table_entry_nbytes(stored.encoding);
    }
  }
  return tables_nbytes;
}

void RankFileWriter::write_block_tables(ByteRange range) {
  ByteWriter tables;
  for (const PieceState& piece : pieces_) {
    if (!piece.has_own_dataset() || own_dataset_of(piece).blocks.size() <= 1) continue;
    for (const StoredBlock& block : own_dataset_of(piece).blocks) {
      if (stored_of(piece).encoding == Encoding::zstd) {
        tables.u64(block.range.begin);
        tables.u64(block.range.nbytes());
      }
      tables.u64(block.checksum);
    }
  }
  TESSERA_CHECK(tables.bytes().size() == range.nbytes());
  h5_file_.bytes().write_at(range.begin, tables.bytes());
}

std::vector<ByteRange> RankFileWriter::data_ranges() {
  std::vector<ByteRange> ranges;
  for (const PieceState& piece : pieces_) {
    const StoredPiece& stored = stored_of(piece);
    if (stored.file != 0) continue;
    if (stored.encoding == Encoding::plain) {
      ranges.push_back({stored.begin, stored.begin + stored.stored_nbytes});
    } else if (piece.has_own_dataset()) {
      for (const StoredBlock& block : own_dataset_of(piece).blocks) ranges.push_back(block.range);
    }
  }
  std::ranges::sort(ranges, {}, &ByteRange::begin);
  return ranges;
}

}  // namespace tessera::formats::native
