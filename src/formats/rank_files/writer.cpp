#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "formats/drivers.h"
#include "formats/paged_data.h"
#include "formats/rank_files/rank_contents.h"
#include "formats/staging/file_syncs.h"
#include "formats/staging/staged_work.h"
#include "formats/torch_zip/storage_blocks.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

using rank_files::RankContents;
using torch_zip::StorageBlocks;
using torch_zip::TorchSaveLayout;

/// Returns the contents without the parts that this format has no place for.
CheckpointContents without_extras(CheckpointContents contents) {
  contents.world_size = std::max(contents.world_size, 1);
  contents.units.clear();
  contents.annotations.clear();
  return contents;
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// Writes the storages of the ranks' files. A file is open, and its layout in memory, from its
/// first block to its last block. The thread that writes the last block also writes the bytes
/// around the storages, and gives the file to `syncs_`, which syncs and closes it.
class RankFilesWriter final : public ShareWriter {
 public:
  RankFilesWriter(FileSystem& fs, std::string destination, CheckpointContents contents,
                  std::vector<Value> values, const DeviceMeshOptions& mesh, const WorkOptions& work)
      : fs_(fs),
        contents_(without_extras(std::move(contents))),
        values_(std::move(values)),
        files_(contents_, values_, mesh, destination),
        states_(files_.num_files()),
        blocks_(contents_),
        work_(fs, std::move(destination), DestinationKind::directory, work) {
    files_.require_readable();
    work_.set_file_names(files_.names());
    for (std::size_t file = 0; file < files_.num_files(); ++file) {
      for (const auto& piece : files_.storages(file)) {
        if (piece && blocks_.nbytes(*piece) > 0) order_.push_back(*piece);
      }
    }
    for (const PieceId piece : order_) {
      states_[files_.place_of(piece).file].unwritten_nbytes += blocks_.nbytes(piece);
    }
  }

  const CheckpointContents& contents() const override { return contents_; }

  std::span<const PieceId> write_order() const override { return order_; }
  std::int64_t block_numel(PieceId piece) const override { return blocks_.numel(piece); }

  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    const Open open = open_file(piece);
    const ByteRange range = range_of(*open.layout, piece, begin, bytes.size());
    const std::uint32_t crc = crc32(0, bytes);
    open.file->write_at(range.begin, bytes);
    if (Journal* journal = work_.journal()) {
      journal->note({piece, begin}, {.range = range, .checksum = crc});
    }
    count_off(piece, begin, crc, bytes.size());
  }

  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override {
    const Open open = open_file(piece);
    const auto checksum =
        read_plain_block(work_.journal(), {piece, begin}, path_of(files_.place_of(piece).file),
                         range_of(*open.layout, piece, begin, room.size()), room);
    if (!checksum || crc32(0, room) != *checksum) return false;
    count_off(piece, begin, static_cast<std::uint32_t>(*checksum), room.size());
    return true;
  }

  Unit unit() const override { return Unit::block; }
  std::size_t file_of(PieceId piece) const override { return files_.place_of(piece).file; }
  void adopt_block(PieceId piece, std::int64_t begin) override {
    const Open open = open_file(piece);
    const std::uint64_t block_nbytes = blocks_.nbytes(piece, begin);
    const FinishedBlock block =
        recorded_plain_block(work_.journal(), {piece, begin}, path_of(files_.place_of(piece).file),
                             range_of(*open.layout, piece, begin, block_nbytes));
    count_off(piece, begin, static_cast<std::uint32_t>(block.checksum), block_nbytes);
  }
  void commit_share() override {
    for (FileState& state : states_) {
      if (state.file) syncs_.add(std::move(state.file));
    }
    syncs_.wait();
    work_.commit_share();
  }

  bool is_resumed() const override { return work_.is_resumed(); }
  bool keep_work() noexcept override { return work_.keep(); }

  void abandon() noexcept override {}  // no thread waits in write_block

  void commit() override {
    for (std::size_t file = 0; file < states_.size(); ++file) {
      TESSERA_CHECK(states_[file].unwritten_nbytes == 0);
      if (!states_[file].is_finished) finish(file);
    }
    syncs_.wait();
    work_.commit();
  }

 private:
  struct FileState {
    std::atomic<std::uint64_t> unwritten_nbytes = 0;
    std::mutex open_mutex;
    std::unique_ptr<WritableFile> file;  // from the first block to the last one
    std::shared_ptr<const TorchSaveLayout> layout;
    bool is_finished = false;
  };
  /// An open file. The layout is shared with FileState, which drops its copy when the file is
  /// finished.
  struct Open {
    WritableFile* file;
    std::shared_ptr<const TorchSaveLayout> layout;
  };

  std::string path_of(std::size_t file) const {
    return join_path(work_.staging_path(), files_.name(file));
  }

  /// Returns the range of a block in its file.
  ByteRange range_of(const TorchSaveLayout& layout, PieceId piece, std::int64_t begin,
                     std::uint64_t block_nbytes) const {
    const std::uint64_t first = layout.storage_range(files_.place_of(piece).storage).begin +
                                blocks_.begin_byte(piece, begin, block_nbytes);
    return {first, first + block_nbytes};
  }

  /// Opens the file of a piece, unless it is open already, and returns it. The file has its final
  /// size.
  Open open_file(PieceId piece) { return open_file(files_.place_of(piece).file); }
  Open open_file(std::size_t file) {
    FileState& state = states_[file];
    const std::scoped_lock lock(state.open_mutex);
    TESSERA_CHECK(!state.is_finished);
    if (!state.layout) state.layout = std::make_shared<TorchSaveLayout>(files_.layout(file));
    if (!state.file) {
      state.file = begin_file(fs_, work_.journal(), path_of(file));
      const std::uint64_t file_nbytes = state.layout->nbytes();
      state.file->resize(file_nbytes);
      if (file_nbytes >= kMinUncachedFileNbytes) state.file->bypass_cache();
    }
    return {state.file.get(), state.layout};
  }

  /// Counts a written block, and keeps its CRC. Finishes the file after its last block.
  void count_off(PieceId piece, std::int64_t begin, std::uint32_t crc, std::uint64_t block_nbytes) {
    blocks_.set_crc(piece, blocks_.begin_byte(piece, begin, block_nbytes), crc);
    const std::size_t file = files_.place_of(piece).file;
    const std::uint64_t left_before = states_[file].unwritten_nbytes.fetch_sub(block_nbytes);
    TESSERA_CHECK(left_before >= block_nbytes);
    if (left_before == block_nbytes) finish(file);
  }

  /// Writes all bytes of a file except the tensors' storages. `syncs_` then syncs and closes it.
  void finish(std::size_t file) {
    const Open open = open_file(file);
    std::vector<std::uint32_t> crcs;
    const auto& storages = files_.storages(file);
    for (const auto& piece : storages) crcs.push_back(piece ? blocks_.crc_of(*piece) : 0);
    if (files_.has_ranks_storage(file)) {
      crcs.back() = crc32(0, bytes_of(files_.ranks_bytes()));
      open.file->write_at(open.layout->storage_range(storages.size() - 1).begin,
                          bytes_of(files_.ranks_bytes()));
    }
    for (const auto& [begin, bytes] : open.layout->segments_around_storages(crcs)) {
      open.file->write_at(begin, bytes_of(bytes));
    }
    FileState& state = states_[file];
    syncs_.add(std::move(state.file));
    state.layout.reset();
    state.is_finished = true;
  }

  FileSystem& fs_;
  const CheckpointContents contents_;
  const std::vector<Value> values_;
  const RankContents files_;
  std::vector<FileState> states_;  // indexed by file
  StorageBlocks blocks_;
  std::vector<PieceId> order_;  // file by file
  StagedWork work_;
  FileSyncs syncs_;
};

class RankFilesFormatWriter final : public FormatWriter {
 public:
  Format format() const override { return rank_files_driver().format(); }

  std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                          SharedContents contents, std::vector<Value> values,
                                          const CreateOptions& options) const override {
    return std::make_unique<RankFilesWriter>(fs, destination, *contents, std::move(values),
                                             options.device_mesh, work_options(options));
  }
  std::unique_ptr<ShareWriter> start_share(FileSystem& fs, const std::string& destination,
                                           SharedContents contents, std::vector<Value> values,
                                           const CreateOptions& options,
                                           const ShareOptions& share) const override {
    return std::make_unique<RankFilesWriter>(fs, destination, *contents, std::move(values),
                                             options.device_mesh, work_options(options, share));
  }
  void check_staging(FileSystem& fs, const std::string& destination,
                     const CheckpointContents& contents, const std::vector<Value>& values,
                     const CreateOptions& options) const override {
    const CheckpointContents written = without_extras(contents);
    const RankContents files(written, values, options.device_mesh, destination);
    files.require_readable();
    StagedWork::check(fs, destination, DestinationKind::directory, work_options(options),
                      files.names());
  }
  std::string describe_options(const CreateOptions& options) const override {
    std::string text = "mesh " + options.device_mesh.device_type;
    for (const std::string& name : options.device_mesh.dim_names) text += ' ' + name;
    return text;
  }
};

}  // namespace

const FormatWriter& rank_files_writer() {
  static const RankFilesFormatWriter writer;
  return writer;
}

}  // namespace tessera::formats
