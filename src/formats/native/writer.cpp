#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/json.h"
#include "formats/drivers.h"
#include "formats/key_order.h"
#include "formats/native/index_file.h"
#include "formats/native/native_base.h"
#include "formats/native/native_parts.h"
#include "formats/native/packed_pieces.h"
#include "formats/native/rank_file.h"
#include "formats/native/write_options.h"
#include "formats/part_files.h"
#include "formats/staging/staged_work.h"
#include "formats/staging/staged_writer.h"
#include "tessera/base/error.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace native {
namespace {

/// Throws Error(unsupported) naming the largest value if the values alone make the index too large.
void require_small_values(const CheckpointContents& contents,
                          const std::vector<std::string>& value_json, const std::string& path) {
  std::uint64_t nbytes = 0;
  for (const std::string& json : value_json) nbytes += json.size();
  if (nbytes <= kMaxIndexNbytes) return;
  const auto largest =
      std::ranges::max_element(value_json, {}, [](const auto& json) { return json.size(); });
  const auto index = static_cast<std::size_t>(largest - value_json.begin());
  throw Error::expected(ErrorKind::unsupported, {.path = path, .fqn = contents.values[index].name},
                        "size of all values",
                        "at most " + std::to_string(kMaxIndexNbytes) + " bytes",
                        std::to_string(nbytes) + " bytes, of which this value has " +
                            std::to_string(largest->size()));
}

/// Throws if a rank holds a region twice: both pieces would have the same link name.
void validate_pieces_per_rank(const CheckpointContents& contents, const std::string& path) {
  for (const TensorEntry& tensor : contents.tensors) {
    std::set<std::pair<int, Region>> held;
    for (const Piece& piece : tensor.pieces) {
      if (numel_of(piece.region) > 0 && !held.emplace(piece.rank, piece.region).second) {
        throw Error::expected(
            ErrorKind::invalid_argument, {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}},
            "pieces", "each region once per rank",
            region_to_string(piece.region) + " twice on rank " + std::to_string(piece.rank));
      }
    }
  }
}

/// Writes the files of the selected ranks into a directory. A derived class defines `commit`.
class RankFilesWriter : public ShareWriter, public ChunkSink {
  struct RankSlot {
    std::mutex mutex;  // guards the pointer
    std::unique_ptr<RankFileWriter> file;
    std::atomic<std::size_t> next_number = 0;  // of the piece that is expected next
  };

 public:
  /// File names end in `suffix`. `journal` may be null.
  RankFilesWriter(FileSystem& fs, std::string directory, Index index, RankSelection ranks,
                  std::string suffix, const NativeWriteOptions& options, Journal* journal)
      : fs_(fs),
        directory_(std::move(directory)),
        index_(std::move(index)),
        ranks_(ranks),
        suffix_(std::move(suffix)),
        options_(options),
        journal_(journal),
        pieces_by_rank_(pieces_by_rank(index_.contents)),
        rank_slots_(pieces_by_rank_.size()) {
    if (options_.linked) {
      for (int rank = ranks_.begin; rank < ranks_.end; ++rank) {
        link_files(fs_, directory_, index_, *options_.linked, pieces_of(rank));
      }
    }
    const auto all = all_pieces();
    if (std::ranges::all_of(all, [&](PieceId id) { return is_written(id); })) return;
    std::ranges::copy_if(all, std::back_inserter(written_pieces_),
                         [&](PieceId id) { return is_written(id); });
    are_all_written_ = false;
  }

  const CheckpointContents& contents() const override { return index_.contents; }

  std::span<const PieceId> write_order() const override {
    return are_all_written_ ? all_pieces() : written_pieces_;
  }

  std::int64_t block_numel(PieceId piece) const override {
    if (index_.patch(piece) != nullptr) return patched_block_numel(index_.rows(piece), options_);
    return block_numel_of(numel_of(piece_of(piece).region),
                          itemsize(index_.contents->tensors[piece.tensor_index].meta.dtype),
                          options_);
  }

  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    rank_file(piece_of(piece).rank).write_block(number_of(piece), begin, bytes);
  }

  // If the options set a zstd level, all chunks must have it. A stored chunk's level is unknown.
  bool takes_chunks(PieceId piece) const override {
    return !options_.zstd_level && index_.patch(piece) == nullptr &&
           may_compress(nbytes_of(piece_of(piece).region,
                                  index_.contents->tensors[piece.tensor_index].meta.dtype),
                        options_);
  }
  bool write_chunk(PieceId piece, std::int64_t begin, const StoredChunk& chunk) override {
    return rank_file(piece_of(piece).rank).write_chunk(number_of(piece), begin, chunk);
  }

  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override {
    const auto block = journal_ != nullptr ? journal_->find({piece, begin}) : std::nullopt;
    return block &&
           rank_file(piece_of(piece).rank).resume_block(number_of(piece), begin, *block, room);
  }

  // A rank file's tables are written with its last block, so one process writes the whole file.
  Unit unit() const override { return Unit::file; }
  std::size_t file_of(PieceId piece) const override {
    return static_cast<std::size_t>(piece_of(piece).rank);
  }
  void adopt_block(PieceId /*piece*/, std::int64_t /*begin*/) override { are_ranks_there_ = true; }
  /// Writes the headers of the complete files, which still lack the checkpoint id.
  void commit_share() override {
    for (int rank = ranks_.begin; rank < ranks_.end; ++rank) {
      if (!rank_slots_[static_cast<std::size_t>(rank)].file) continue;
      write_header(fs_, rank_path(rank), finish_rank(rank));
    }
  }

  void abandon() noexcept override {
    abandoned_ = true;
    for (RankSlot& slot : rank_slots_) {
      const std::lock_guard lock(slot.mutex);
      if (slot.file) slot.file->abandon();
    }
  }

 protected:
  FileSystem& file_system() { return fs_; }
  const std::string& directory() const { return directory_; }
  RankSelection ranks() const { return ranks_; }
  const Journal* journal() const { return journal_; }

  std::string rank_path(int rank) const {
    return join_path(directory_, rank_file_name(rank) + suffix_);
  }

  /// Frees the writer of a complete rank file, and adds the file's record to the index. Returns the
  /// file's header, which still lacks the checkpoint id.
  FileHeader finish_rank(int rank) {
    const RankFileWriter& file = rank_file(rank);
    TESSERA_CHECK(file.is_complete());
    const auto number = static_cast<std::size_t>(rank);
    index_.rank_files.push_back(file.record());
    FileHeader header;
    header.version = index_.format_version;
    header.role = FileRole::rank;
    header.rank = static_cast<std::uint32_t>(rank);
    header.world_size = static_cast<std::uint32_t>(rank_slots_.size());
    header.checkpoint_id = kUnsealedId;
    header.index_range = file.index_range();
    header.index_checksum = file.record().index_checksum;
    header.structure_checksum = file.record().structure_checksum;
    header.file_nbytes = file.record().nbytes;
    rank_slots_[number].file.reset();
    return header;
  }

  /// Finishes the file of a rank. If workers wrote it ([Note: Shared work]), checks the file and
  /// copies its results to the index. Otherwise calls `finish_rank`. Workers do not write the file
  /// of a rank without blocks. Throws: Error(corruption) if a worker's file is not what this writer
  /// would have written.
  FileHeader finish_or_adopt_rank(int rank) {
    const auto pieces = pieces_of(rank);
    const bool has_blocks = std::ranges::any_of(pieces, [&](PieceId id) { return is_written(id); });
    if (!are_ranks_there_ || !has_blocks) return finish_rank(rank);
    const RankFileIndex found =
        read_part(fs_, directory_, rank, select_pieces(index_, pieces), index_.contents->world_size,
                  "did another program change the file?");
    take_storage(index_, pieces, found.index);
    index_.rank_files.push_back(found.record());
    return found.header;
  }

  /// Frees memory that is not needed after the last `finish_rank`.
  void forget_pieces() {
    pieces_by_rank_ = {};
    written_pieces_ = {};
  }

  /// Returns the index with the results of `finish_rank`.
  const Index& index() const { return index_; }

 private:
  const Piece& piece_of(PieceId id) const {
    return index_.contents->tensors[id.tensor_index].pieces[id.piece_index];
  }

  std::span<const PieceId> pieces_of(int rank) const {
    return pieces_by_rank_[static_cast<std::size_t>(rank)];
  }
  /// Returns the pieces of all selected ranks.
  std::span<const PieceId> all_pieces() const {
    const std::size_t begin = pieces_by_rank_.first(static_cast<std::size_t>(ranks_.begin));
    const std::size_t end = pieces_by_rank_.first(static_cast<std::size_t>(ranks_.end));
    return pieces_by_rank_.items().subspan(begin, end - begin);
  }

  /// Whether a piece has blocks to write: it has elements, and is not linked as it is.
  bool is_written(PieceId id) const {
    return numel_of(piece_of(id).region) > 0 &&
           (index_.storage.file_of(id) == 0 || index_.patch(id) != nullptr);
  }

  /// Returns the piece's number in its rank's file. Cost: constant if blocks come in the order of
  /// the pieces.
  std::size_t number_of(PieceId id) {
    const int rank = piece_of(id).rank;
    const auto pieces = pieces_of(rank);
    std::atomic<std::size_t>& next = rank_slots_[static_cast<std::size_t>(rank)].next_number;
    std::size_t number = next.load(std::memory_order_relaxed);
    if (number >= pieces.size() || pieces[number] != id) {
      number = static_cast<std::size_t>(std::ranges::lower_bound(pieces, id) - pieces.begin());
    }
    next.store(number + 1, std::memory_order_relaxed);
    return number;
  }

  /// Returns the writer of the rank's file. The first call for a rank creates both.
  RankFileWriter& rank_file(int rank) {
    TESSERA_CHECK(ranks_.contains(rank));
    const auto number = static_cast<std::size_t>(rank);
    RankSlot& slot = rank_slots_[number];
    const std::lock_guard lock(slot.mutex);
    if (abandoned_) throw Error(ErrorKind::interrupted, {}, "writing was abandoned");
    if (!slot.file) {
      // HDF5 needs a new file, in which all unwritten bytes are zero.
      if (journal_ != nullptr && journal_->is_shared() && !journal_->is_resumed()) {
        fs_.remove_all(rank_path(rank));
      }
      slot.file = std::make_unique<RankFileWriter>(
          fs_, rank_path(rank), RankFileContents{index_, pieces_of(rank)}, options_, journal_);
    }
    return *slot.file;
  }

  FileSystem& fs_;
  const std::string directory_;
  Index index_;
  const RankSelection ranks_;
  const std::string suffix_;
  const NativeWriteOptions options_;
  Journal* const journal_;
  tessera::detail::ListOfLists<PieceId> pieces_by_rank_;
  bool are_all_written_ = true;          // each piece of the selected ranks has blocks
  std::vector<PieceId> written_pieces_;  // empty if `are_all_written_`
  std::vector<RankSlot> rank_slots_;     // indexed by rank
  std::atomic<bool> abandoned_ = false;
  bool are_ranks_there_ = false;  // workers have written the rank files
};

/// Writes all rank files and the index.
class NativeWriter final : public RankFilesWriter {
 public:
  NativeWriter(FileSystem& fs, std::string directory, Index index, RankSelection all_ranks,
               const NativeWriteOptions& options, Journal* journal)
      : RankFilesWriter(fs, std::move(directory), std::move(index), all_ranks, "", options,
                        journal) {}

  void commit() override {
    std::vector<FileHeader> headers;
    for (int rank = ranks().begin; rank < ranks().end; ++rank) {
      headers.push_back(finish_or_adopt_rank(rank));
    }
    forget_pieces();
    const std::string index_path = join_path(directory(), kIndexFileName);
    // HDF5 needs a new file, in which all unwritten bytes are zero. So the index that an
    // interrupted run began is removed.
    if (journal() != nullptr && journal()->is_resumed()) file_system().remove_all(index_path);
    const std::uint64_t checkpoint_id = write_index_file(file_system(), index_path, index());
    for (FileHeader& header : headers) {
      header.checkpoint_id = checkpoint_id;
      write_header(file_system(), rank_path(static_cast<int>(header.rank)), header);
    }
  }
};

/// Writes one rank's file. `commit` gives the file its name.
class NativePartWriter final : public RankFilesWriter {
 public:
  NativePartWriter(FileSystem& fs, std::string directory, Index index, int rank,
                   const NativeWriteOptions& options)
      : RankFilesWriter(fs, std::move(directory), std::move(index), {rank, rank + 1},
                        kUncommittedSuffix, options, nullptr) {}

  void commit() override {
    const int rank = ranks().begin;
    write_header(file_system(), rank_path(rank), finish_rank(rank));
    file_system().rename(rank_path(rank), join_path(directory(), rank_file_name(rank)));
  }
};

}  // namespace

Index describe_checkpoint(SharedContents contents, const std::vector<Value>& values,
                          const NativeWriteOptions& options, const std::string& path) {
  validate_options(options);
  validate_contents(contents, ErrorKind::invalid_argument, path);
  validate_pieces_per_rank(contents, path);
  if (values.size() != contents->values.size()) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "values",
                          std::to_string(contents->values.size()), std::to_string(values.size()));
  }
  Index index;
  index.format_version = format_version_for(contents);
  index.chunk_nbytes = options.chunk_nbytes;
  index.has_virtual_datasets =
      options.virtual_datasets == NativeWriteOptions::VirtualDatasets::write;
  for (const Value& value : values) index.value_json.push_back(value_to_json(value));
  require_small_values(*contents, index.value_json, path);
  index.key_order = key_order_text(contents);
  index.contents = std::move(contents);
  std::size_t num_pieces = 0;
  for (const TensorEntry& tensor : index.contents->tensors) num_pieces += tensor.pieces.size();
  index.storage.reserve(index.contents->tensors.size(), num_pieces);
  for (const TensorEntry& tensor : index.contents->tensors) {
    index.storage.add(tensor.pieces.size());
  }
  if (options.compression != NativeWriteOptions::Compression::none) {
    index.storage.keep_all_members();
  }
  if (options.linked) enter_linked_pieces(index, *options.linked);
  return index;
}

std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              const std::vector<Value>& values, int rank,
                                              const NativeWriteOptions& options) {
  Index index = describe_checkpoint(std::move(contents), values, options, directory);
  return std::make_unique<NativePartWriter>(fs, std::move(directory), std::move(index), rank,
                                            options);
}

}  // namespace native

namespace {

std::set<std::string> linked_file_names(const native::Index& index) {
  std::set<std::string> names;
  for (const native::LinkedFile& file : index.linked_files) names.insert(file.name());
  return names;
}

/// Returns the names of all files in the directory.
std::set<std::string> file_names(const native::Index& index) {
  std::set<std::string> names = linked_file_names(index);
  names.insert(native::kIndexFileName);
  for (int rank = 0; rank < index.contents->world_size; ++rank) {
    names.insert(native::rank_file_name(rank));
  }
  return names;
}

std::unique_ptr<ShareWriter> start_native(FileSystem& fs, std::string destination,
                                          SharedContents contents, const std::vector<Value>& values,
                                          WorkOptions work, const NativeWriteOptions& options) {
  native::Index index =
      native::describe_checkpoint(std::move(contents), values, options, destination);
  work.linked_names = linked_file_names(index);
  auto staged =
      std::make_unique<StagedWork>(fs, std::move(destination), DestinationKind::directory, work);
  const RankSelection all_ranks{0, index.contents->world_size};
  staged->set_file_names(file_names(index));
  auto writer = std::make_unique<native::NativeWriter>(fs, staged->staging_path(), std::move(index),
                                                       all_ranks, options, staged->journal());
  return std::make_unique<StagedWriter>(std::move(staged), std::move(writer));
}

class NativeParts final : public PartsWriter {
 public:
  std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                                CheckpointContents contents,
                                                std::vector<Value> values, int rank,
                                                const PartOptions& options) const override {
    return native::create_part(fs, std::move(directory), std::move(contents), values, rank,
                               options.native);
  }
  std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                           const CheckpointContents& contents, const std::vector<Value>& values,
                           const PartOptions& options) const override {
    return native::join_parts(fs, directory, contents, values, options.native);
  }
  void seal_part(FileSystem& fs, const std::string& directory, int rank,
                 std::uint64_t token) const override {
    native::seal_part(fs, directory, rank, token);
  }
  void finish_parts(FileSystem& fs, const std::string& directory,
                    const CheckpointContents& /*contents*/,
                    const std::vector<Value>& /*values*/) const override {
    rebuild_native_index(fs, directory);
  }
};

class NativeFormatWriter final : public FormatWriter {
 public:
  Format format() const override { return Format::native; }

  std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                          SharedContents contents, std::vector<Value> values,
                                          const CreateOptions& options) const override {
    return start_native(fs, destination, std::move(contents), values, work_options(options),
                        options.native);
  }
  std::unique_ptr<ShareWriter> start_share(FileSystem& fs, const std::string& destination,
                                           SharedContents contents, std::vector<Value> values,
                                           const CreateOptions& options,
                                           const ShareOptions& share) const override {
    return start_native(fs, destination, std::move(contents), values, work_options(options, share),
                        options.native);
  }
  void check_staging(FileSystem& fs, const std::string& destination,
                     const CheckpointContents& contents, const std::vector<Value>& values,
                     const CreateOptions& options) const override {
    const native::Index index = native::describe_checkpoint(SharedContents::of(contents), values,
                                                            options.native, destination);
    WorkOptions work = work_options(options);
    work.linked_names = linked_file_names(index);
    StagedWork::check(fs, destination, DestinationKind::directory, work, file_names(index));
  }
  std::string describe_options(const CreateOptions& options) const override {
    const NativeWriteOptions& native = options.native;
    std::string text;
    if (native.compression == NativeWriteOptions::Compression::zstd) {
      text = "zstd" + (native.zstd_level ? ":" + std::to_string(*native.zstd_level) : "") +
             " in chunks of " + std::to_string(native.chunk_nbytes) + " bytes";
    }
    if (native.linked) {
      text += (text.empty() ? "" : ", ") + std::string("base ") + native.linked->base->identity() +
              " with " + std::to_string(native.linked->pairs.size()) + " linked pieces of " +
              std::to_string(native.linked->nbytes) + " bytes";
      if (const std::size_t num_patched = native.linked->changed_rows.size(); num_patched > 0) {
        text += ", " + std::to_string(num_patched) + " of them with changed rows";
      }
    }
    return text;
  }
  std::shared_ptr<const BaseCheckpoint> open_base(const FileSystem& fs,
                                                  const std::string& path) const override {
    return native::open_base(fs, path);
  }
  // HDF5 reads bytes that it has written, and overwrites them.
  bool writes_bytes_once() const override { return false; }
  const PartsWriter* parts() const override {
    static const NativeParts parts;
    return &parts;
  }
};

}  // namespace

const FormatWriter& native_writer() {
  static const NativeFormatWriter writer;
  return writer;
}

std::unique_ptr<CheckpointWriter> create_native(FileSystem& fs, std::string destination,
                                                CheckpointContents contents,
                                                std::vector<Value> values,
                                                OverwritePolicy overwrite,
                                                const NativeWriteOptions& options) {
  return start_native(fs, std::move(destination), std::move(contents), values, {overwrite, {}},
                      options);
}

}  // namespace tessera::formats
