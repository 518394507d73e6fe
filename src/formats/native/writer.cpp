#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "formats/native/index_file.h"
#include "formats/native/rank_file.h"
#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace native {
namespace {

void validate_options(const NativeWriteOptions& options) {
  const auto require_multiple = [](std::string_view name, std::uint64_t nbytes,
                                   std::uint64_t greatest) {
    if (nbytes == 0 || nbytes % kPlainBlockNbytes != 0 || nbytes > greatest) {
      throw Error::expected(ErrorKind::invalid_argument, {}, name,
                            "a multiple of " + std::to_string(kPlainBlockNbytes) + " up to " +
                                std::to_string(greatest),
                            std::to_string(nbytes));
    }
  };
  require_multiple("chunk_nbytes", options.chunk_nbytes, kMaxChunkNbytes);
  require_multiple("plain_block_nbytes", options.plain_block_nbytes, std::uint64_t{1} << 30);
  constexpr int kMinLevel = -100;
  constexpr int kMaxLevel = 19;
  if (options.zstd_level < kMinLevel || options.zstd_level > kMaxLevel) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "zstd_level",
                          std::to_string(kMinLevel) + " to " + std::to_string(kMaxLevel),
                          std::to_string(options.zstd_level));
  }
}

/// Each rank holds a region once: two pieces of one name could not be told apart.
void validate_pieces_per_rank(const CheckpointContents& contents, const std::string& path) {
  for (const TensorEntry& tensor : contents.tensors) {
    std::set<std::pair<int, Region>> held;
    for (const Piece& piece : tensor.pieces) {
      if (numel_of(piece.region) > 0 && !held.emplace(piece.rank, piece.region).second) {
        throw Error::expected(
            ErrorKind::invalid_argument, {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}},
            "pieces", "a region once per rank",
            region_to_string(piece.region) + " twice on rank " + std::to_string(piece.rank));
      }
    }
  }
}

class NativeWriter final : public CheckpointWriter {
  struct RankSlot {
    std::mutex mutex;  // of the pointer
    std::unique_ptr<RankFileWriter> file;
  };

 public:
  NativeWriter(FileSystem& fs, std::string destination, CheckpointContents contents,
               const std::vector<Value>& values, OverwritePolicy overwrite,
               const NativeWriteOptions& options)
      : fs_(fs),
        options_(options),
        rank_slots_(static_cast<std::size_t>(std::max(contents.world_size, 0))) {
    validate_options(options_);
    validate_contents(contents, ErrorKind::invalid_argument, destination);
    validate_pieces_per_rank(contents, destination);
    if (values.size() != contents.values.size()) {
      throw Error::expected(ErrorKind::invalid_argument, {.path = destination}, "values",
                            std::to_string(contents.values.size()), std::to_string(values.size()));
    }
    index_.chunk_nbytes = options_.chunk_nbytes;
    index_.has_virtual_datasets =
        options_.virtual_datasets == NativeWriteOptions::VirtualDatasets::write;
    for (const Value& value : values) index_.value_json.push_back(value_to_json(value));
    index_.contents = std::move(contents);
    for (const TensorEntry& tensor : index_.contents.tensors) {
      index_.storage.emplace_back(tensor.pieces.size());
      numbers_on_rank_.emplace_back(tensor.pieces.size());
    }
    pieces_by_rank_ = pieces_by_rank(index_.contents);
    for (const auto& pieces : pieces_by_rank_) {
      for (std::size_t number = 0; number < pieces.size(); ++number) {
        numbers_on_rank_[pieces[number].tensor_index][pieces[number].piece_index] = number;
      }
    }
    staged_ = std::make_unique<StagedDestination>(fs_, std::move(destination),
                                                  DestinationKind::directory, overwrite);
  }

  const CheckpointContents& contents() const override { return index_.contents; }

  std::vector<PieceId> write_order() const override {
    std::vector<PieceId> order;
    for (const auto& pieces : pieces_by_rank_) {
      std::ranges::copy_if(pieces, std::back_inserter(order),
                           [&](const PieceId& id) { return numel_of(piece_of(id).region) > 0; });
    }
    return order;
  }

  std::int64_t block_numel(PieceId piece) const override {
    return block_numel_of(numel_of(piece_of(piece).region),
                          itemsize(index_.contents.tensors[piece.tensor_index].meta.dtype),
                          options_);
  }

  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    rank_file(static_cast<std::size_t>(piece_of(piece).rank))
        .write_block(numbers_on_rank_[piece.tensor_index][piece.piece_index], begin, bytes);
  }

  void abandon() noexcept override {
    abandoned_ = true;
    for (RankSlot& slot : rank_slots_) {
      const std::lock_guard lock(slot.mutex);
      if (slot.file) slot.file->abandon();
    }
  }

  void commit() override {
    std::vector<FileHeader> headers;
    for (std::size_t rank = 0; rank < rank_slots_.size(); ++rank) {
      const RankFileWriter& file = rank_file(rank);
      TESSERA_CHECK(file.is_complete());
      take_storage(rank, file.index());
      index_.rank_files.push_back(file.record());
      FileHeader& header = headers.emplace_back();
      header.role = FileRole::rank;
      header.rank = static_cast<std::uint32_t>(rank);
      header.world_size = static_cast<std::uint32_t>(rank_slots_.size());
      header.index_range = file.index_range();
      header.index_checksum = file.record().index_checksum;
      header.structure_checksum = file.record().structure_checksum;
      header.file_nbytes = file.record().nbytes;
      rank_slots_[rank].file.reset();
    }
    const std::uint64_t checkpoint_id =
        write_index_file(fs_, join_path(staged_->staging_path(), kIndexFileName), index_);
    for (FileHeader& header : headers) {
      header.checkpoint_id = checkpoint_id;
      write_header(fs_, rank_path(header.rank), header);
    }
    staged_->commit();
  }

 private:
  const Piece& piece_of(PieceId id) const {
    return index_.contents.tensors[id.tensor_index].pieces[id.piece_index];
  }

  std::string rank_path(std::size_t rank) const {
    return join_path(staged_->staging_path(), rank_file_name(static_cast<std::int64_t>(rank)));
  }

  /// Returns the rank's file, which comes into being when its first block does.
  RankFileWriter& rank_file(std::size_t rank) {
    RankSlot& slot = rank_slots_[rank];
    const std::lock_guard lock(slot.mutex);
    if (abandoned_) throw Error(ErrorKind::interrupted, {}, "writing was abandoned");
    if (!slot.file) {
      slot.file = std::make_unique<RankFileWriter>(
          fs_, rank_path(rank), select_pieces(index_, pieces_by_rank_[rank]), options_);
    }
    return *slot.file;
  }

  /// Takes over where the pieces of a complete rank file lie.
  void take_storage(std::size_t rank, const Index& rank_index) {
    auto id = pieces_by_rank_[rank].begin();
    for (const auto& stored_pieces : rank_index.storage) {
      for (const StoredPiece& stored : stored_pieces) {
        index_.storage[id->tensor_index][id->piece_index] = stored;
        ++id;
      }
    }
  }

  FileSystem& fs_;
  const NativeWriteOptions options_;
  Index index_;
  std::vector<std::vector<PieceId>> pieces_by_rank_;
  std::vector<std::vector<std::size_t>> numbers_on_rank_;  // [tensor][piece]
  std::unique_ptr<StagedDestination> staged_;              // outlives the files within
  std::vector<RankSlot> rank_slots_;                       // by rank
  std::atomic<bool> abandoned_ = false;
};

}  // namespace
}  // namespace native

std::unique_ptr<CheckpointWriter> create_native(FileSystem& fs, std::string destination,
                                                CheckpointContents contents,
                                                std::vector<Value> values,
                                                OverwritePolicy overwrite,
                                                const NativeWriteOptions& options) {
  return std::make_unique<native::NativeWriter>(fs, std::move(destination), std::move(contents),
                                                values, overwrite, options);
}

}  // namespace tessera::formats
