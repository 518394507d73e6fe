#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "formats/deepspeed.h"
#include "formats/deepspeed/universal_entries.h"
#include "formats/deepspeed/universal_files.h"
#include "formats/deepspeed/universal_notes.h"
#include "formats/drivers.h"
#include "formats/paged_data.h"
#include "formats/staging/file_syncs.h"
#include "formats/staging/staged_work.h"
#include "formats/torch_zip/storage_blocks.h"
#include "formats/whole_tensors.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats {
namespace {

using deepspeed::UniversalFiles;
using torch_zip::StorageBlocks;

constexpr std::string_view kFormat = "a universal checkpoint";

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// Writes many small archives. A file is open from its first block to its last. The thread that
/// writes the last block also writes the rest of the archive (headers, pickle, directory).
class UniversalWriter final : public ShareWriter {
 public:
  UniversalWriter(FileSystem& fs, std::string destination, CheckpointContents contents,
                  const std::vector<Value>& values, const WorkOptions& work)
      : fs_(fs),
        contents_(on_one_rank(std::move(contents), destination, kFormat)),
        blocks_(contents_),
        files_(contents_, values, destination),
        states_(files_.num_files()),
        work_(fs, std::move(destination), DestinationKind::directory, work) {
    work_.set_file_names(files_.paths());
    for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
      for (const UniversalFiles::Place& place : files_.places_of(i)) {
        states_[place.file].unwritten_nbytes += tensor_nbytes(i);
      }
    }
    for (const std::string& folder : files_.folders()) {
      const std::string path = join_path(work_.staging_path(), folder);
      make_folder(path);
    }
  }

  const CheckpointContents& contents() const override { return contents_; }

  std::span<const PieceId> write_order() const override { return blocks_.write_order(); }
  std::int64_t block_numel(PieceId piece) const override { return blocks_.numel(piece); }

  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    const std::size_t i = piece.tensor_index;
    const std::uint64_t begin_byte = blocks_.begin_byte(piece, begin, bytes.size());
    const std::uint32_t crc = crc32(0, bytes);
    const auto& places = files_.places_of(i);
    for (const UniversalFiles::Place& place : places) {
      open(place.file).write_at(range_of(place, begin_byte, bytes.size()).begin, bytes);
    }
    if (Journal* journal = work_.journal()) {
      const ByteRange range = range_of(places.front(), begin_byte, bytes.size());
      journal->note({piece, begin}, {.range = range, .checksum = crc});
    }
    count_off(i, begin_byte, crc, bytes.size());
  }

  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override {
    const std::size_t i = piece.tensor_index;
    const std::uint64_t begin_byte = blocks_.begin_byte(piece, begin, room.size());
    const auto& places = files_.places_of(i);
    const auto checksum =
        read_plain_block(work_.journal(), {piece, begin}, path_of(places.front().file),
                         range_of(places.front(), begin_byte, room.size()), room);
    if (!checksum || crc32(0, room) != *checksum) return false;
    // So far only the first copy of the block was checked. A crash may have lost the other copies.
    std::vector<std::byte> other(places.size() > 1 ? room.size() : 0);
    for (const UniversalFiles::Place& place : std::span(places).subspan(1)) {
      const bool is_there = work_.journal()->read_back(
          path_of(place.file), range_of(place, begin_byte, room.size()), other);
      if (!is_there || !std::ranges::equal(other, room)) return false;
    }
    count_off(i, begin_byte, static_cast<std::uint32_t>(*checksum), room.size());
    return true;
  }

  Unit unit() const override { return Unit::block; }
  std::size_t file_of(PieceId piece) const override {
    return files_.places_of(piece.tensor_index).front().file;
  }
  void adopt_block(PieceId piece, std::int64_t begin) override {
    const std::uint64_t nbytes = blocks_.nbytes(piece, begin);
    const std::uint64_t begin_byte = blocks_.begin_byte(piece, begin, nbytes);
    const UniversalFiles::Place& place = files_.places_of(piece.tensor_index).front();
    const FinishedBlock block = recorded_plain_block(
        work_.journal(), {piece, begin}, path_of(place.file), range_of(place, begin_byte, nbytes));
    count_off(piece.tensor_index, begin_byte, static_cast<std::uint32_t>(block.checksum), nbytes);
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
    std::vector<std::string> folders;
    for (const std::string& folder : files_.folders()) {
      folders.push_back(join_path(work_.staging_path(), folder));
    }
    sync_directories(fs_, folders);
    work_.commit();
  }

 private:
  struct FileState {
    std::atomic<std::uint64_t> unwritten_nbytes = 0;
    std::mutex open_mutex;
    std::unique_ptr<WritableFile> file;  // from the first block to the last one
    bool is_finished = false;
  };

  /// Makes a folder, unless an interrupted run or another share has made it.
  void make_folder(const std::string& path) {
    try {
      if ((is_resumed() || work_.is_share()) && fs_.kind_of(path)) return;
      fs_.make_directory(path);
    } catch (const Error& error) {
      if (!work_.is_share() || error.kind() != ErrorKind::already_exists) throw;
    }
  }

  std::uint64_t tensor_nbytes(std::size_t i) const { return contents_.tensors[i].meta.nbytes(); }
  std::string path_of(std::size_t file) const {
    return join_path(work_.staging_path(), files_.path(file));
  }

  /// Returns the byte range of a block in `place`, one of the files that hold its tensor.
  ByteRange range_of(const UniversalFiles::Place& place, std::uint64_t begin_byte,
                     std::uint64_t nbytes) const {
    const std::uint64_t first =
        files_.layout(place.file)->storage_range(place.storage).begin + begin_byte;
    return {first, first + nbytes};
  }

  /// Returns the file, open and of its final size.
  WritableFile& open(std::size_t file) {
    FileState& state = states_[file];
    const std::scoped_lock lock(state.open_mutex);
    if (!state.file) {
      state.file = begin_file(fs_, work_.journal(), path_of(file));
      const std::uint64_t nbytes = files_.layout(file)->nbytes();
      state.file->resize(nbytes);
      if (nbytes >= kMinUncachedFileNbytes) state.file->bypass_cache();
    }
    return *state.file;
  }

  /// Counts a written block, and keeps its CRC. After the last block of a file, finishes the file.
  void count_off(std::size_t i, std::uint64_t begin_byte, std::uint32_t crc, std::uint64_t nbytes) {
    blocks_.set_crc({i, 0}, begin_byte, crc);
    for (const UniversalFiles::Place& place : files_.places_of(i)) {
      const std::uint64_t left_before = states_[place.file].unwritten_nbytes.fetch_sub(nbytes);
      TESSERA_CHECK(left_before >= nbytes);
      if (left_before == nbytes) finish(place.file);
    }
  }

  /// Writes the rest of a file: all but the tensors' storages. `syncs_` then syncs and closes it.
  void finish(std::size_t file) {
    if (const std::string* const text = files_.text(file)) {
      auto created = create_anew(fs_, work_.journal(), path_of(file));
      created->write_at(0, bytes_of(*text));
      syncs_.add(std::move(created));
    } else {
      finish_archive(file);
    }
    states_[file].is_finished = true;
  }

  void finish_archive(std::size_t file) {
    const auto layout = files_.layout(file);
    const std::vector<UniversalFiles::Storage> storages = files_.storages(file);
    WritableFile& opened = open(file);
    std::vector<std::uint32_t> crcs;
    for (std::size_t s = 0; s < storages.size(); ++s) {
      const auto& [tensor, bytes] = storages[s];
      crcs.push_back(tensor ? blocks_.crc_of({*tensor, 0}) : crc32(0, bytes_of(bytes)));
      if (!tensor) opened.write_at(layout->storage_range(s).begin, bytes_of(bytes));
    }
    for (const auto& [begin, bytes] : layout->segments_around_storages(crcs)) {
      opened.write_at(begin, bytes_of(bytes));
    }
    syncs_.add(std::move(states_[file].file));
  }

  FileSystem& fs_;
  const CheckpointContents contents_;
  StorageBlocks blocks_;
  const UniversalFiles files_;
  std::vector<FileState> states_;  // by file
  StagedWork work_;
  FileSyncs syncs_;
};

class DeepSpeedFormatWriter final : public FormatWriter {
 public:
  Format format() const override { return deepspeed_driver().format(); }

  std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                          SharedContents contents, std::vector<Value> values,
                                          const CreateOptions& options) const override {
    return std::make_unique<UniversalWriter>(fs, destination, *contents, values,
                                             work_options(options));
  }
  std::unique_ptr<ShareWriter> start_share(FileSystem& fs, const std::string& destination,
                                           SharedContents contents, std::vector<Value> values,
                                           const CreateOptions& options,
                                           const ShareOptions& share) const override {
    return std::make_unique<UniversalWriter>(fs, destination, *contents, values,
                                             work_options(options, share));
  }
  void check_staging(FileSystem& fs, const std::string& destination,
                     const CheckpointContents& contents, const std::vector<Value>& values,
                     const CreateOptions& options) const override {
    const CheckpointContents written = on_one_rank(contents, destination, kFormat);
    const UniversalFiles files(written, values, destination);
    StagedWork::check(fs, destination, DestinationKind::directory, work_options(options),
                      files.paths());
  }
  std::vector<Finding> notes(const std::string& destination, const CheckpointContents& contents,
                             const CreateOptions& /*options*/,
                             const std::function<std::vector<Value>()>& values,
                             const ReadElement& read) const override {
    const deepspeed::UniversalEntries entries =
        deepspeed::sort_entries(on_one_rank(contents, destination, kFormat), values(), destination);
    std::vector<Finding> notes;
    const auto add = [&](const std::optional<Finding>& note) {
      if (note) notes.push_back(*note);
    };
    add(deepspeed::note_of_params_without_state(entries, destination));
    add(deepspeed::note_of_steps(entries, contents, destination, read));
    return notes;
  }
};

}  // namespace

const FormatWriter& deepspeed_writer() {
  static const DeepSpeedFormatWriter writer;
  return writer;
}

std::unique_ptr<CheckpointWriter> create_deepspeed(FileSystem& fs, std::string destination,
                                                   CheckpointContents contents,
                                                   std::vector<Value> values,
                                                   OverwritePolicy overwrite) {
  return std::make_unique<UniversalWriter>(fs, std::move(destination), std::move(contents), values,
                                           WorkOptions{overwrite, {}});
}

}  // namespace tessera::formats
