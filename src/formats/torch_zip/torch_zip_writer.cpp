#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "formats/drivers.h"
#include "formats/paged_data.h"
#include "formats/staging/staged_work.h"
#include "formats/torch_zip.h"
#include "formats/torch_zip/state_dict_pickle.h"
#include "formats/torch_zip/storage_blocks.h"
#include "formats/torch_zip/torch_save_layout.h"
#include "formats/torch_zip/unwritten_file.h"
#include "formats/whole_tensors.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

using torch_zip::StorageBlocks;
using torch_zip::TorchSaveLayout;

constexpr std::string_view kFormat = "torch.save";

TorchSaveLayout lay_out(const CheckpointContents& contents, const std::vector<Value>& values,
                        const std::string& destination) {
  std::vector<std::uint64_t> storage_nbytes;
  for (const TensorEntry& tensor : contents.tensors) storage_nbytes.push_back(tensor.meta.nbytes());
  TorchSaveLayout layout(torch_zip::pickle_state_dict(contents, values, destination),
                         storage_nbytes, TorchSaveLayout::LargeStorages::at_pages);
  torch_zip::require_readable(layout, destination);
  return layout;
}

/// Writes a torch.save file. The places of the storages are known from the start. The bytes between
/// the storages (zip headers, directory) hold the CRCs, so only `commit` writes them.
class TorchZipWriter final : public ShareWriter {
 public:
  TorchZipWriter(FileSystem& fs, std::string destination, CheckpointContents contents,
                 const std::vector<Value>& values, const WorkOptions& work)
      : contents_(on_one_rank(std::move(contents), destination, kFormat)),
        blocks_(contents_),
        layout_(lay_out(contents_, values, destination)),
        work_(fs, std::move(destination), DestinationKind::file, work),
        file_(fs.open_for_update(work_.staging_path())) {
    for (const TensorEntry& tensor : contents_.tensors) unwritten_nbytes_ += tensor.meta.nbytes();
    file_->resize(layout_.nbytes());
    if (layout_.nbytes() >= kMinUncachedFileNbytes) file_->bypass_cache();
  }

  const CheckpointContents& contents() const override { return contents_; }

  std::span<const PieceId> write_order() const override { return blocks_.write_order(); }
  std::int64_t block_numel(PieceId piece) const override { return blocks_.numel(piece); }

  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    const ByteRange range = range_of(piece, begin, bytes.size());
    const std::uint32_t crc = crc32(0, bytes);
    file_->write_at(range.begin, bytes);
    if (Journal* journal = work_.journal()) {
      journal->note({piece, begin}, {.range = range, .checksum = crc});
    }
    count_off(piece, begin, crc, bytes.size());
  }

  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override {
    const auto checksum = read_plain_block(work_.journal(), {piece, begin}, work_.staging_path(),
                                           range_of(piece, begin, room.size()), room);
    if (!checksum) return false;
    const std::uint32_t crc = crc32(0, room);
    if (crc != *checksum) return false;
    count_off(piece, begin, crc, room.size());
    return true;
  }

  Unit unit() const override { return Unit::block; }
  std::size_t file_of(PieceId /*piece*/) const override { return 0; }
  void adopt_block(PieceId piece, std::int64_t begin) override {
    const std::uint64_t nbytes = blocks_.nbytes(piece, begin);
    const FinishedBlock block = recorded_plain_block(
        work_.journal(), {piece, begin}, work_.staging_path(), range_of(piece, begin, nbytes));
    count_off(piece, begin, static_cast<std::uint32_t>(block.checksum), nbytes);
  }
  void commit_share() override {
    file_->sync();
    file_->close();
    work_.commit_share();
  }

  bool is_resumed() const override { return work_.is_resumed(); }
  bool keep_work() noexcept override { return work_.keep(); }

  void abandon() noexcept override {}  // no thread waits in write_block

  void commit() override {
    TESSERA_CHECK(unwritten_nbytes_ == 0);
    for (const auto& [begin, bytes] : layout_.segments_around_storages(storage_crcs())) {
      file_->write_at(begin, std::as_bytes(std::span(bytes)));
    }
    file_->sync();
    file_->close();
    work_.commit();
  }

 private:
  /// Returns the range of the block in the file.
  ByteRange range_of(PieceId piece, std::int64_t begin, std::uint64_t nbytes) const {
    const std::uint64_t first =
        layout_.storage_range(piece.tensor_index).begin + blocks_.begin_byte(piece, begin, nbytes);
    return {first, first + nbytes};
  }

  /// Counts a written block, and keeps its CRC for `commit`.
  void count_off(PieceId piece, std::int64_t begin, std::uint32_t crc, std::uint64_t nbytes) {
    blocks_.set_crc(piece, blocks_.begin_byte(piece, begin, nbytes), crc);
    unwritten_nbytes_ -= nbytes;
  }

  std::vector<std::uint32_t> storage_crcs() const {
    std::vector<std::uint32_t> crcs;
    for (std::size_t i = 0; i < contents_.tensors.size(); ++i)
      crcs.push_back(blocks_.crc_of({i, 0}));
    return crcs;
  }

  const CheckpointContents contents_;
  StorageBlocks blocks_;
  const TorchSaveLayout layout_;
  StagedWork work_;
  std::unique_ptr<WritableFile> file_;
  std::atomic<std::uint64_t> unwritten_nbytes_ = 0;
};

class TorchZipFormatWriter final : public FormatWriter {
 public:
  Format format() const override { return Format::torch_zip; }

  std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                          SharedContents contents, std::vector<Value> values,
                                          const CreateOptions& options) const override {
    return std::make_unique<TorchZipWriter>(fs, destination, *contents, values,
                                            work_options(options));
  }
  std::unique_ptr<ShareWriter> start_share(FileSystem& fs, const std::string& destination,
                                           SharedContents contents, std::vector<Value> values,
                                           const CreateOptions& options,
                                           const ShareOptions& share) const override {
    return std::make_unique<TorchZipWriter>(fs, destination, *contents, values,
                                            work_options(options, share));
  }
  void check_staging(FileSystem& fs, const std::string& destination,
                     const CheckpointContents& contents, const std::vector<Value>& values,
                     const CreateOptions& options) const override {
    lay_out(on_one_rank(contents, destination, kFormat), values, destination);
    StagedWork::check(fs, destination, DestinationKind::file, work_options(options));
  }
};

}  // namespace

const FormatWriter& torch_zip_writer() {
  static const TorchZipFormatWriter writer;
  return writer;
}

std::unique_ptr<CheckpointWriter> create_torch_zip(FileSystem& fs, std::string destination,
                                                   CheckpointContents contents,
                                                   std::vector<Value> values,
                                                   OverwritePolicy overwrite) {
  return std::make_unique<TorchZipWriter>(fs, std::move(destination), std::move(contents), values,
                                          WorkOptions{overwrite, {}});
}

}  // namespace tessera::formats
