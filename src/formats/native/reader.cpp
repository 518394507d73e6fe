#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/byte_buffer.h"
#include "base/json.h"
#include "formats/key_order.h"
#include "formats/known_ranges.h"
#include "formats/native/chunk_codec.h"
#include "formats/native/index.h"
#include "formats/native/native_checkpoint.h"
#include "formats/native/native_verify.h"
#include "formats/native/patch_reader.h"
#include "formats/native/rank_files.h"
#include "formats/native/stored_blocks.h"
#include "formats/stored_chunks.h"
#include "tessera/base/error.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace native {
namespace {

// A checkpoint's values may be nested deeper than other JSON, because their writer does not limit
// the depth.
constexpr JsonLimits kValueLimits = {.max_depth = 1000, .max_nbytes = kMaxIndexNbytes};

class NativeReader final : public NativeCheckpoint, public ChunkSource, public KnownRanges {
 public:
  NativeReader(const FileSystem& fs, std::string path, std::uint64_t checkpoint_id, Index index)
      : fs_(fs),
        path_(std::move(path)),
        checkpoint_id_(checkpoint_id),
        index_(std::move(index)),
        rank_files_(fs, path_, checkpoint_id, index_) {}

  std::uint64_t checkpoint_id() const override { return checkpoint_id_; }
  const Index& index() const override { return index_; }
  void read_unpatched(PieceId id, FlatRange range, std::span<std::byte> out) const override {
    const TensorEntry& tensor = index_.contents->tensors.at(id.tensor_index);
    const Piece& piece = tensor.pieces.at(id.piece_index);
    const std::uint64_t element_nbytes = itemsize(tensor.meta.dtype);
    TESSERA_CHECK(range.begin >= 0 && range.begin <= range.end &&
                  range.end <= numel_of(piece.region) &&
                  out.size() == static_cast<std::uint64_t>(range.numel()) * element_nbytes);
    if (out.empty()) return;
    const StoredPiece stored = index_.stored(id);
    const BlockGrid grid = index_.grid(id);
    const auto begin = static_cast<std::uint64_t>(range.begin) * element_nbytes;
    const ByteRange wanted{begin, begin + out.size()};
    const ReadableFile& file = rank_files_.open(piece.rank, stored);
    if (stored.encoding == Encoding::plain) {
      read_plain_range(file, tensor.meta.fqn, stored, grid, wanted, out);
      return;
    }
    const std::uint64_t first = wanted.begin / grid.block_nbytes;
    const std::uint64_t last = (wanted.end - 1) / grid.block_nbytes + 1;
    for (std::uint64_t block = first; block < last; block += kEntriesPerRead) {
      const auto entries = read_block_entries(file, tensor.meta.fqn, stored, grid, block,
                                              std::min(block + kEntriesPerRead, last));
      read_chunks(file, tensor.meta, grid, block, entries, wanted, out);
    }
  }

  Format format() const override { return Format::native; }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return index_.contents; }
  std::vector<std::vector<std::string>> dict_orders() const override {
    if (index_.key_order.empty()) return {};
    return {names_in_dict_order(index_.contents)};
  }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const PieceId id(tensor_index, piece_index);
    read_unpatched(id, range, out);
    if (out.empty() || index_.patch(id) == nullptr) return;
    patch_of(id).apply(range, out);
  }

  std::optional<StoredChunk> read_chunk(std::size_t tensor_index, std::size_t piece_index,
                                        FlatRange range, std::int64_t chunk_numel,
                                        tessera::detail::ByteBuffer& room) const override {
    const TensorEntry& tensor = index_.contents->tensors.at(tensor_index);
    const Piece& piece = tensor.pieces.at(piece_index);
    const StoredPiece stored = index_.stored({tensor_index, piece_index});
    if (stored.encoding != Encoding::zstd || index_.patch({tensor_index, piece_index}) != nullptr) {
      return std::nullopt;
    }
    const BlockGrid grid = index_.grid({tensor_index, piece_index});
    const std::int64_t end = std::min(range.begin + chunk_numel, numel_of(piece.region));
    const bool is_chunk = grid.block_nbytes == static_cast<std::uint64_t>(chunk_numel) *
                                                   itemsize(tensor.meta.dtype) &&
                          range.begin % chunk_numel == 0 && range.end == end && range.numel() > 0;
    if (!is_chunk) return std::nullopt;
    const ReadableFile& file = rank_files_.open(piece.rank, stored);
    const auto number = static_cast<std::uint64_t>(range.begin / chunk_numel);
    const StoredBlock entry =
        read_block_entries(file, tensor.meta.fqn, stored, grid, number, number + 1).front();
    const auto bytes = room.take(entry.range.nbytes());
    file.read_at(entry.range.begin, bytes);
    require_checksum(file, tensor.meta.fqn, entry, bytes);
    try {
      require_chunk_nbytes(bytes, grid.block_nbytes);
    } catch (const Error& error) {
      throw at_chunk(error, file, tensor.meta, entry);
    }
    return StoredChunk{
        .bytes = bytes, .checksum = entry.checksum, .is_raw = bytes.size() == grid.block_nbytes};
  }

  Value read_value(std::size_t value_index) const override {
    const std::string path = join_path(path_, kIndexFileName);
    return value_from_json(parse_json(index_.value_json.at(value_index), path, kValueLimits), path);
  }

  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    const Piece& piece = index_.contents->tensors.at(tensor_index).pieces.at(piece_index);
    const StoredPiece stored = index_.stored({tensor_index, piece_index});
    PieceStorage storage;
    storage.file = file_name_of(index_, piece.rank, stored);
    storage.encoding = stored.encoding == Encoding::zstd ? "zstd" : "plain";
    storage.stored_nbytes = stored.stored_nbytes;
    if (const StoredPatch* const patch = index_.patch({tensor_index, piece_index})) {
      storage.encoding = "patched";
      storage.stored_nbytes += patch->numbers.stored_nbytes + patch->rows.stored_nbytes;
      return storage;
    }
    const bool is_one_range = stored.encoding == Encoding::plain ||
                              index_.grid({tensor_index, piece_index}).num_blocks() == 1;
    if (is_one_range) storage.byte_range = {stored.begin, stored.begin + stored.stored_nbytes};
    return storage;
  }

  std::optional<KnownRange> known_range(std::size_t tensor_index,
                                        std::size_t piece_index) const override {
    PieceStorage storage = piece_storage(tensor_index, piece_index);
    if (storage.encoding != "plain") storage.byte_range.reset();
    return KnownRange{join_path(path_, storage.file), storage.byte_range};
  }

  std::vector<std::string> data_files() const override {
    std::vector<std::string> paths;
    for (int rank = 0; rank < index_.contents->world_size; ++rank) {
      paths.push_back(join_path(path_, rank_file_name(rank)));
    }
    for (const LinkedFile& file : index_.linked_files) {
      paths.push_back(join_path(path_, file.name()));
    }
    return paths;
  }

  MissingData find_missing_data() const override {
    std::vector<bool> is_lost;
    for (const std::string& path : data_files()) is_lost.push_back(!fs_.kind_of(path));
    MissingData missing;
    if (std::ranges::find(is_lost, true) == is_lost.end()) return missing;
    for (std::size_t t = 0; t < index_.contents->tensors.size(); ++t) {
      const std::vector<Piece>& pieces = index_.contents->tensors[t].pieces;
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        const StoredPiece stored = index_.stored({t, p});
        const std::size_t file = stored.file == 0 ? static_cast<std::size_t>(pieces[p].rank)
                                                  : index_.rank_files.size() + stored.file - 1;
        if (numel_of(pieces[p].region) == 0) continue;
        if (is_lost[file]) {
          missing.pieces[t].emplace(p, file_name_of(index_, pieces[p].rank, stored));
        } else if (index_.patch({t, p}) != nullptr &&
                   is_lost[static_cast<std::size_t>(pieces[p].rank)]) {
          missing.pieces[t].emplace(p, rank_file_name(pieces[p].rank));
        }
      }
    }
    return missing;
  }

  void check_files(const FindingSink& sink) const override {
    check_rank_files(fs_, path_, checkpoint_id_, index_, sink);
  }

  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    verify_checkpoint(fs_, path_, checkpoint_id_, index_, sink, progress, num_threads, part);
  }

 private:
  /// Returns the patch of a patched piece. The first call reads the numbers of its rows.
  const PatchReader& patch_of(PieceId id) const {
    const TensorEntry& tensor = index_.contents->tensors[id.tensor_index];
    const ReadableFile& file = rank_files_.open(tensor.pieces[id.piece_index].rank, {});
    const std::lock_guard lock(patches_mutex_);
    std::unique_ptr<const PatchReader>& patch = patches_[id];
    if (!patch) {
      patch = std::make_unique<const PatchReader>(file, tensor.meta, *index_.patch(id),
                                                  index_.rows(id));
    }
    return *patch;
  }

  static void read_chunks(const ReadableFile& file, const TensorMeta& meta, const BlockGrid& grid,
                          std::uint64_t first_chunk, std::span<const StoredBlock> entries,
                          ByteRange wanted, std::span<std::byte> out) {
    thread_local ChunkDecoder decoder;
    thread_local tessera::detail::ByteBuffer buffer;
    const std::uint64_t element_nbytes = itemsize(meta.dtype);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto stored = buffer.take(entries[i].range.nbytes());
      file.read_at(entries[i].range.begin, stored);
      require_checksum(file, meta.fqn, entries[i], stored);
      const ByteRange chunk = grid.block(first_chunk + i);
      const std::uint64_t begin = std::max(chunk.begin, wanted.begin);
      const std::uint64_t end = std::min(chunk.end, wanted.end);
      try {
        decoder.decode(stored, element_nbytes, grid.block_nbytes,
                       (begin - chunk.begin) / element_nbytes, (end - chunk.begin) / element_nbytes,
                       out.subspan(begin - wanted.begin, end - begin));
      } catch (const Error& error) {
        throw at_chunk(error, file, meta, entries[i]);
      }
    }
  }

  /// Returns the error with the file, the tensor and the byte range of the chunk.
  static Error at_chunk(const Error& error, const ReadableFile& file, const TensorMeta& meta,
                        const StoredBlock& chunk) {
    return {error.kind(),
            {.path = file.path(), .fqn = meta.fqn, .byte_range = chunk.range},
            error.what()};
  }

  const FileSystem& fs_;
  std::string path_;
  std::uint64_t checkpoint_id_;
  Index index_;
  RankFiles rank_files_;
  mutable std::mutex patches_mutex_;
  mutable std::map<PieceId, std::unique_ptr<const PatchReader>> patches_;
};

/// Throws the error for a path without an index.
[[noreturn]] void throw_no_index(const FileSystem& fs, const std::string& path,
                                 const std::string& index_path) {
  if (fs.kind_of(path) != FileKind::directory) {
    if (!fs.kind_of(path)) throw Error(ErrorKind::not_found, {.path = path}, "no such directory");
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "native checkpoint",
                          "a directory", "a file");
  }
  if (fs.kind_of(join_path(path, rank_file_name(0)))) {
    throw Error::expected(ErrorKind::corruption, {.path = index_path}, "index", "a file", "none",
                          "`ckpt-reshard rebuild-index` rebuilds it from the rank files");
  }
  throw Error::expected(ErrorKind::not_found, {.path = index_path}, "index", "a file", "none",
                        "is this a native checkpoint?");
}

}  // namespace

std::unique_ptr<NativeCheckpoint> open_native_checkpoint(const FileSystem& fs, std::string path) {
  const std::string index_path = join_path(path, kIndexFileName);
  if (!fs.kind_of(index_path)) throw_no_index(fs, path, index_path);
  require_contained(fs, path, kIndexFileName);
  const auto file = fs.open(index_path);
  const FileHeader header = read_header(*file);
  require_index_role(header, index_path);
  if (header.checkpoint_id != header.index_checksum) {
    throw Error(ErrorKind::corruption, {.path = index_path},
                "header: expected the checkpoint id to be the index checksum, found another id");
  }
  Index index = decode_index(read_index_bytes(*file, header), header, index_path);
  return std::make_unique<NativeReader>(fs, std::move(path), header.checkpoint_id,
                                        std::move(index));
}

}  // namespace native

std::unique_ptr<CheckpointReader> open_native(const FileSystem& fs, std::string path) {
  return native::open_native_checkpoint(fs, std::move(path));
}

}  // namespace tessera::formats
