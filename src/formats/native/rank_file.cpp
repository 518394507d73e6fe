#include "formats/native/rank_file.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/byte_buffer.h"
#include "base/checked_math.h"
#include "base/digest.h"
#include "formats/native/byte_stream.h"
#include "formats/native/chunk_codec.h"
#include "formats/native/link_name.h"
#include "formats/native/packed_pieces.h"
#include "tessera/base/error.h"
#include "tessera/formats/base_checkpoint.h"

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
  list_own_datasets();
  std::uint64_t data_nbytes = 0;
  for (std::size_t number = 0; number < contents_.pieces.size(); ++number) {
    const PieceWriting each = piece(number);
    if (each.is_patched) {
      data_nbytes += contents_.whole.patch(each.id)->rows.stored_nbytes;
    } else if (each.block_numel > 0) {
      data_nbytes += each.nbytes;
    }
  }
  is_streamed_ = data_nbytes >= kMinStreamedNbytes;
  if (is_streamed_) h5_file_.bytes().bypass_cache();
  lay_out_packed();
  for (const auto& own : own_patches_) lay_out_patch(*own);
  if (options_.compression == NativeWriteOptions::Compression::none) {
    for (OwnDataset& own : own_datasets_) lay_out_plain(own);
    const auto ranges = data_ranges();
    if (!ranges.empty()) reserve(ranges.back().end);
  }
  for (const auto& own : own_patches_) {
    own->writer.write_numbers(h5_file_.bytes(), stored_patch_of(*own));
  }
  skip_pieces_without_dataset();
  if (num_blocks_left_ == 0) complete();
}

/// Fills `own_datasets_`, and counts all blocks. The file's index lists the tensors of the file's
/// pieces, and the tensors that have no piece on any rank.
void RankFileWriter::list_own_datasets() {
  const std::vector<TensorEntry>& tensors = contents_.whole.contents->tensors;
  std::size_t num_tensors = 0;
  std::size_t next = 0;  // index of a tensor
  for (std::size_t number = 0; number < contents_.pieces.size(); ++number) {
    const std::size_t tensor_index = contents_.pieces[number].tensor_index;
    for (; next <= tensor_index; ++next) {
      if (next == tensor_index || tensors[next].pieces.empty()) ++num_tensors;
    }
    const PieceWriting each = piece(number);
    if (each.block_numel == 0) continue;
    const auto numel =
        static_cast<std::int64_t>(each.nbytes / itemsize(tensor_of(each.id).meta.dtype));
    num_blocks_left_ += ceil_div(numel, each.block_numel);
    if (each.is_packed) continue;
    if (each.is_patched) {
      own_patches_.push_back(std::unique_ptr<OwnPatch>(
          new OwnPatch{number,
                       num_tensors - 1,
                       {options_.linked->changed_rows.at(each.id), contents_.whole.rows(each.id),
                        each.block_numel}}));
      continue;
    }
    own_datasets_.push_back({.piece_number = number, .tensor_number = num_tensors - 1});
  }
}

RankFileWriter::PieceWriting RankFileWriter::piece(std::size_t number) const {
  PieceWriting each{.id = contents_.pieces[number]};
  const DType dtype = tensor_of(each.id).meta.dtype;
  each.nbytes = tessera::nbytes_of(region_of(each.id), dtype);
  const bool is_linked = contents_.whole.storage.file_of(each.id) != 0;
  if (is_linked && contents_.whole.patch(each.id) != nullptr) {
    each.is_patched = true;
    each.block_numel = patched_block_numel(contents_.whole.rows(each.id), options_);
    return each;
  }
  if (each.nbytes == 0 || is_linked) return each;  // linked: its bytes are in another file
  const std::uint64_t element_nbytes = itemsize(dtype);
  each.is_packed = is_packed(contents_.whole.format_version, each.nbytes);
  each.may_compress = may_compress(each.nbytes, options_);
  each.block_numel = block_numel_of(static_cast<std::int64_t>(each.nbytes / element_nbytes),
                                    element_nbytes, options_);
  return each;
}

const TensorEntry& RankFileWriter::tensor_of(PieceId id) const {
  return contents_.whole.contents->tensors[id.tensor_index];
}

const Region& RankFileWriter::region_of(PieceId id) const {
  return tensor_of(id).pieces[id.piece_index].region;
}

std::string RankFileWriter::link_name_of(std::size_t piece_number,
                                         std::size_t tensor_number) const {
  const PieceId id = contents_.pieces[piece_number];
  return piece_link_name(tensor_of(id).meta.fqn, tensor_number, region_of(id));
}

/// Requires: the piece has a dataset of its own.
RankFileWriter::OwnDataset& RankFileWriter::own_dataset_of(std::size_t piece_number) {
  return *std::ranges::lower_bound(own_datasets_, piece_number, {}, &OwnDataset::piece_number);
}

/// Requires: the piece is patched.
RankFileWriter::OwnPatch& RankFileWriter::own_patch_of(std::size_t piece_number) {
  const auto found = std::ranges::lower_bound(own_patches_, piece_number, {},
                                              [](const auto& own) { return own->piece_number; });
  return **found;
}

StoredPatch& RankFileWriter::stored_patch_of(const OwnPatch& own) {
  return contents_.whole.patches.at(contents_.pieces[own.piece_number]);
}

/// Creates one dataset for the packed pieces of each dtype, and sets the place of each packed
/// piece.
void RankFileWriter::lay_out_packed() {
  const auto for_each_packed = [&](const auto& visit) {
    for (std::size_t number = 0; number < contents_.pieces.size(); ++number) {
      const PieceWriting each = piece(number);
      if (each.is_packed) visit(each, tensor_of(each.id).meta.dtype);
    }
  };
  PackedNumels numels;
  for_each_packed([&](const PieceWriting& each, DType dtype) {
    numels.add(dtype, static_cast<std::int64_t>(each.nbytes / itemsize(dtype)));
  });
  std::array<std::uint64_t, kNumDTypes> ends{};  // indexed by dtype: where its next piece begins
  for (int code = 0; code < kNumDTypes; ++code) {
    const auto dtype = static_cast<DType>(code);
    if (numels.of(dtype) == 0) continue;
    if (!own_group_) own_group_ = h5::create_group(h5_file_, kOwnGroup);
    const h5::PlainDataset dataset = h5::create_plain_dataset(
        h5_file_, own_group_.id(), packed_dataset_name(dtype), dtype, numels.of(dtype));
    h5::write_attribute(h5_file_, dataset.handle, "dtype", dtype_name(dtype));
    ends[static_cast<std::size_t>(code)] = dataset.range.begin;
  }
  for_each_packed([&](const PieceWriting& each, DType dtype) {
    std::uint64_t& end = ends[static_cast<std::size_t>(dtype)];
    contents_.whole.storage.set(
        each.id, {.position = each.id.piece_index, .encoding = Encoding::plain, .begin = end});
    end += each.nbytes;
  });
}

/// Creates the datasets of a patch.
void RankFileWriter::lay_out_patch(OwnPatch& own) {
  const PieceId id = contents_.pieces[own.piece_number];
  const DType dtype = tensor_of(id).meta.dtype;
  const std::string name = link_name_of(own.piece_number, own.tensor_number);
  StoredPatch& patch = stored_patch_of(own);
  patch.numbers.begin =
      h5::create_plain_dataset(h5_file_, h5_file_.handle.id(), name + kRowNumbersSuffix,
                               DType::int64, static_cast<std::int64_t>(patch.num_rows))
          .range.begin;
  const h5::PlainDataset rows = h5::create_plain_dataset(
      h5_file_, h5_file_.handle.id(), name + kRowsSuffix, dtype,
      static_cast<std::int64_t>(patch.rows.stored_nbytes / itemsize(dtype)));
  describe(id, rows.handle);
  patch.rows.begin = rows.range.begin;
}

void RankFileWriter::lay_out_plain(OwnDataset& own) {
  const PieceWriting each = piece(own.piece_number);
  const DType dtype = tensor_of(each.id).meta.dtype;
  const h5::PlainDataset dataset = h5::create_plain_dataset(
      h5_file_, h5_file_.handle.id(), link_name_of(own.piece_number, own.tensor_number), dtype,
      static_cast<std::int64_t>(each.nbytes / itemsize(dtype)));
  describe(each.id, dataset.handle);
  contents_.whole.storage.set_place(each.id, Encoding::plain, dataset.range.begin);
  own.blocks.resize((each.nbytes - 1) / kPlainBlockNbytes + 1);
}

void RankFileWriter::lay_out_zstd(OwnDataset& own) {
  const PieceWriting each = piece(own.piece_number);
  const DType dtype = tensor_of(each.id).meta.dtype;
  const auto numel = static_cast<std::int64_t>(each.nbytes / itemsize(dtype));
  own.handle = h5::create_zstd_dataset(h5_file_, link_name_of(own.piece_number, own.tensor_number),
                                       dtype, numel, each.block_numel);
  describe(each.id, own.handle);
  contents_.whole.storage.set_place(each.id, Encoding::zstd, 0);
}

void RankFileWriter::describe(PieceId id, const h5::Handle& dataset) {
  const TensorEntry& tensor = tensor_of(id);
  h5::write_attribute(h5_file_, dataset, "fqn", tensor.meta.fqn);
  h5::write_attribute(h5_file_, dataset, "dtype", dtype_name(tensor.meta.dtype));
  h5::write_attribute(h5_file_, dataset, "shape", tensor.meta.shape);
  h5::write_attribute(h5_file_, dataset, "region", region_to_string(region_of(id)));
  h5::write_attribute(h5_file_, dataset, "kind", state_kind_name(tensor.kind));
}

void RankFileWriter::write_block(std::size_t piece_number, std::int64_t begin,
                                 std::span<const std::byte> bytes) {
  const PieceWriting each = piece(piece_number);
  const std::uint64_t element_nbytes = itemsize(tensor_of(each.id).meta.dtype);
  const std::uint64_t begin_nbytes = static_cast<std::uint64_t>(begin) * element_nbytes;
  TESSERA_CHECK(
      each.block_numel > 0 && begin % each.block_numel == 0 && begin_nbytes < each.nbytes &&
      bytes.size() == std::min(static_cast<std::uint64_t>(each.block_numel) * element_nbytes,
                               each.nbytes - begin_nbytes));
  if (each.is_patched) {
    put_patch(piece_number, begin, bytes);
  } else if (options_.compression == NativeWriteOptions::Compression::none || each.is_packed) {
    put_plain(piece_number, begin, {.bytes = bytes});
  } else {
    const bool is_taken = put_in_turn(piece_number, begin, encode(piece_number, bytes));
    TESSERA_CHECK(is_taken);
  }
  count_off();
}

bool RankFileWriter::write_chunk(std::size_t piece_number, std::int64_t begin,
                                 const StoredChunk& chunk) {
  const PieceWriting each = piece(piece_number);
  TESSERA_CHECK(each.may_compress && begin % each.block_numel == 0);
  if (each.is_packed) return false;
  const Block block{
      .chunk = {chunk.is_raw ? h5::ChunkForm::raw : h5::ChunkForm::filtered, chunk.bytes},
      .chunk_checksum = chunk.checksum};
  if (!put_in_turn(piece_number, begin, block)) return false;
  count_off();
  return true;
}

bool RankFileWriter::resume_block(std::size_t piece_number, std::int64_t begin,
                                  const FinishedBlock& finished, std::span<std::byte> room) {
  if (piece(piece_number).is_patched) return resume_patch(piece_number, begin, finished);
  thread_local std::vector<std::byte> chunk;
  Block block{.place = finished.range};
  const bool is_compressed = options_.compression == NativeWriteOptions::Compression::zstd &&
                             !piece(piece_number).is_packed;
  if (finished.form == BlockForm::plain) {
    // Without compression, a block has one fixed range in the file. If the journal names another
    // range, the block is written again. With compression, the range may differ from run to run.
    if (!is_compressed &&
        finished.range != plain_range(contents_.pieces[piece_number], begin, room.size())) {
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
ByteRange RankFileWriter::plain_range(PieceId id, std::int64_t begin, std::size_t nbytes) const {
  const std::uint64_t offset =
      contents_.whole.stored(id).begin +
      static_cast<std::uint64_t>(begin) * itemsize(tensor_of(id).meta.dtype);
  return {offset, offset + nbytes};
}

/// Writes the changed rows of a block.
void RankFileWriter::put_patch(std::size_t piece_number, std::int64_t begin,
                               std::span<const std::byte> bytes) {
  thread_local tessera::detail::ByteBuffer buffer;
  OwnPatch& own = own_patch_of(piece_number);
  const ByteRange place = own.writer.place_of_block(stored_patch_of(own), begin);
  if (place.nbytes() == 0) return;
  const std::span<std::byte> rows = buffer.take(place.nbytes());
  own.writer.select(begin, bytes, rows);
  h5_file_.bytes().write_at(place.begin, rows);
  own.writer.add_rows(begin, rows);
  note(piece_number, begin, {.range = place, .checksum = xxh3_64(rows)});
}

/// Does what `resume_block` does for a patched piece.
bool RankFileWriter::resume_patch(std::size_t piece_number, std::int64_t begin,
                                  const FinishedBlock& finished) {
  thread_local tessera::detail::ByteBuffer buffer;
  OwnPatch& own = own_patch_of(piece_number);
  const ByteRange place = own.writer.place_of_block(stored_patch_of(own), begin);
  if (finished.form != BlockForm::plain || finished.range != place) return false;
  const std::span<std::byte> rows = buffer.take(place.nbytes());
  if (!journal_->read_back(path_, place, rows) || xxh3_64(rows) != finished.checksum) return false;
  own.writer.add_rows(begin, rows);
  count_off();
  return true;
}

/// Writes the block and records its checksums. Does not write a block that an interrupted run has
/// already written at the same place (`block.place`). Requires: the piece is stored plain.
void RankFileWriter::put_plain(std::size_t piece_number, std::int64_t begin, const Block& block) {
  const PieceWriting each = piece(piece_number);
  const std::uint64_t begin_nbytes =
      static_cast<std::uint64_t>(begin) * itemsize(tensor_of(each.id).meta.dtype);
  const ByteRange range = plain_range(each.id, begin, block.bytes.size());
  if (block.place != range) h5_file_.bytes().write_at(range.begin, block.bytes);
  const std::vector<std::uint64_t> checksums = block_checksums(block.bytes);
  if (each.is_packed) {
    contents_.whole.storage.set_checksum(each.id, checksums.front());
  } else {
    std::vector<StoredBlock>& blocks = own_dataset_of(piece_number).blocks;
    for (std::size_t i = 0; i < checksums.size(); ++i) {
      blocks[begin_nbytes / kPlainBlockNbytes + i].checksum = checksums[i];
    }
  }
  if (block.place != range) {
    note(piece_number, begin, {.range = range, .checksum = checksum_of_checksums(checksums)});
  }
}

/// Returns the block with its compressed chunk. Leaves out the chunk if pieces of this size are not
/// compressed, or if the piece's dataset has already been laid out without compression.
RankFileWriter::Block RankFileWriter::encode(std::size_t piece_number,
                                             std::span<const std::byte> bytes) {
  thread_local ChunkEncoder encoder;
  const PieceWriting each = piece(piece_number);
  Block block{.bytes = bytes};
  {
    const std::lock_guard lock(turn_mutex_);
    const bool is_laid_out_plain = next_piece_ > piece_number;
    if (!each.may_compress || is_laid_out_plain) return block;
  }
  const std::uint64_t element_nbytes = itemsize(tensor_of(each.id).meta.dtype);
  block.chunk = encoder.encode(bytes, element_nbytes,
                               static_cast<std::uint64_t>(each.block_numel) * element_nbytes,
                               options_.zstd_level);
  block.chunk_checksum = xxh3_64(block.chunk.stored);
  return block;
}

/// Waits for the block's turn and writes the block. A piece is stored either plain or as chunks. If
/// the block does not have the bytes in that form, returns false and writes nothing.
bool RankFileWriter::put_in_turn(std::size_t piece_number, std::int64_t begin, const Block& block) {
  const PieceWriting each = piece(piece_number);
  const std::uint64_t element_nbytes = itemsize(tensor_of(each.id).meta.dtype);
  OwnDataset& own = own_dataset_of(piece_number);
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
      lay_out_zstd(own);
    } else if (!block.bytes.empty()) {
      lay_out_plain(own);
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
  if (contents_.whole.stored(each.id).encoding == Encoding::plain) {
    if (block.bytes.empty()) return false;
    if (!is_laid_out_plain()) pass_on_to_next_piece();
    lock.unlock();
    put_plain(piece_number, begin, block);
    return true;
  }
  if (!has_chunk) return false;
  const ByteRange range =
      h5::place_chunk(h5_file_, own.handle, begin, block.chunk.form, block.chunk.stored);
  reserve(range.end);
  own.blocks.push_back({range, block.chunk_checksum});
  next_begin_ += each.block_numel;
  if (static_cast<std::uint64_t>(next_begin_) * element_nbytes >= each.nbytes) {
    own.handle.reset();
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
  const auto next =
      std::ranges::lower_bound(own_datasets_, next_piece_, {}, &OwnDataset::piece_number);
  next_piece_ = next == own_datasets_.end() ? contents_.pieces.size() : next->piece_number;
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
    move_tables(tables_range.begin);
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
  own_datasets_ = std::vector<OwnDataset>();
  own_patches_ = std::vector<std::unique_ptr<OwnPatch>>();
  complete_ = true;
}

/// Sets the StoredPiece of each piece that has a dataset of its own, and each StoredPatch, from the
/// blocks. Places of tables are relative to the start of the first table, because its place in the
/// file is not known yet. Returns the size of all tables. Units: bytes.
std::uint64_t RankFileWriter::settle_storage() {
  std::uint64_t tables_nbytes = 0;
  for (const OwnDataset& own : own_datasets_) {
    const PieceId id = contents_.pieces[own.piece_number];
    StoredPiece stored = contents_.whole.stored(id);
    if (stored.encoding == Encoding::zstd) {
      stored.begin = own.blocks.front().range.begin;
      stored.stored_nbytes = 0;
      for (const StoredBlock& block : own.blocks) stored.stored_nbytes += block.range.nbytes();
    }
    if (own.blocks.size() == 1) {
      stored.checksum_or_table = own.blocks.front().checksum;
    } else {
      stored.checksum_or_table = tables_nbytes;
      tables_nbytes += own.blocks.size() * table_entry_nbytes(stored.encoding);
    }
    contents_.whole.storage.set(id, stored);
  }
  return settle_patches(tables_nbytes);
}

/// Does the same for the patches. Their tables follow those of pieces, which have `tables_nbytes`
/// in all: for each patch first that of its numbers, then that of its rows.
std::uint64_t RankFileWriter::settle_patches(std::uint64_t tables_nbytes) {
  const auto settle = [&](StoredPiece& part, const std::vector<std::uint64_t>& checksums) {
    part.checksum_or_table = checksums.size() == 1 ? checksums.front() : tables_nbytes;
    if (checksums.size() > 1) tables_nbytes += checksums.size() * sizeof(std::uint64_t);
  };
  for (const auto& own : own_patches_) {
    StoredPatch& patch = stored_patch_of(*own);
    settle(patch.numbers, own->writer.number_checksums());
    settle(patch.rows, own->writer.row_checksums());
  }
  return tables_nbytes;
}

/// Makes the places of tables relative to the file, in which the first table is at `begin`.
void RankFileWriter::move_tables(std::uint64_t begin) {
  for (const OwnDataset& own : own_datasets_) {
    if (own.blocks.size() <= 1) continue;
    const PieceId id = contents_.pieces[own.piece_number];
    contents_.whole.storage.set_checksum(id, contents_.whole.stored(id).checksum_or_table + begin);
  }
  for (const auto& own : own_patches_) {
    StoredPatch& patch = stored_patch_of(*own);
    for (StoredPiece* const part : {&patch.numbers, &patch.rows}) {
      if (grid_of(*part).num_blocks() > 1) part->checksum_or_table += begin;
    }
  }
}

void RankFileWriter::write_block_tables(ByteRange range) {
  ByteWriter tables;
  for (const OwnDataset& own : own_datasets_) {
    if (own.blocks.size() <= 1) continue;
    const Encoding encoding = contents_.whole.stored(contents_.pieces[own.piece_number]).encoding;
    for (const StoredBlock& block : own.blocks) {
      if (encoding == Encoding::zstd) {
        tables.u64(block.range.begin);
        tables.u64(block.range.nbytes());
      }
      tables.u64(block.checksum);
    }
  }
  const auto put = [&](const std::vector<std::uint64_t>& checksums) {
    if (checksums.size() <= 1) return;
    for (const std::uint64_t checksum : checksums) tables.u64(checksum);
  };
  for (const auto& own : own_patches_) {
    put(own->writer.number_checksums());
    put(own->writer.row_checksums());
  }
  TESSERA_CHECK(tables.bytes().size() == range.nbytes());
  h5_file_.bytes().write_at(range.begin, tables.bytes());
}

std::vector<ByteRange> RankFileWriter::data_ranges() {
  std::vector<ByteRange> ranges;
  for (const PieceId id : contents_.pieces) {
    const StoredPiece stored = contents_.whole.stored(id);
    if (stored.file != 0 || stored.encoding != Encoding::plain) continue;
    const ByteRange range{stored.begin, stored.begin + stored.stored_nbytes};
    // Packed pieces follow each other.
    if (!ranges.empty() && ranges.back().end == range.begin) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  }
  for (const auto& own : own_patches_) {
    const StoredPatch& patch = stored_patch_of(*own);
    for (const StoredPiece* const part : {&patch.numbers, &patch.rows}) {
      ranges.push_back({part->begin, part->begin + part->stored_nbytes});
    }
  }
  for (const OwnDataset& own : own_datasets_) {
    if (contents_.whole.stored(contents_.pieces[own.piece_number]).encoding != Encoding::zstd) {
      continue;
    }
    for (const StoredBlock& block : own.blocks) ranges.push_back(block.range);
  }
  std::ranges::sort(ranges, {}, &ByteRange::begin);
  return ranges;
}

}  // namespace tessera::formats::native
