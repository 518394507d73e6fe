#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/utf8.h"
#include "formats/dcp/metadata.h"
#include "formats/torch_zip/torch_save_layout.h"
#include "tessera/base/checked_math.h"
#include "tessera/base/digest.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/dcp.h"

namespace tessera::formats {
namespace {

using dcp::Storage;
using dcp::StorageInfo;
using torch_zip::TorchSaveLayout;

constexpr std::uint64_t kBlockNbytes = std::uint64_t{4} << 20;

// Data of this size and more begin at a page of the file, so that they can be written (and mapped)
// without the page cache's help; what lies between two items then is zero.
constexpr std::uint64_t kMinPagedNbytes = std::uint64_t{256} << 10;
constexpr std::uint64_t kPageNbytes = 4096;
constexpr std::uint64_t kMinUncachedFileNbytes = std::uint64_t{8} << 20;

[[noreturn]] void refuse(const std::string& destination, const std::string& fqn,
                         std::string_view rule, std::string_view expected, std::string_view found) {
  throw Error::expected(ErrorKind::invalid_argument, {.path = destination, .fqn = fqn}, rule,
                        expected, found);
}

void check_key_path(const std::string& destination, const std::string& name, const KeyPath& path) {
  if (path.empty() || spell(path) == name) return;
  refuse(destination, name, "key path", "steps that spell the name", spell(path));
}

/// Checks that the key paths of all entries make up one tree: what one entry is in cannot be
/// another entry, or be a dict for one and a list for the other.
class KeyTree {
 public:
  explicit KeyTree(const std::string& destination) : destination_(destination) {}

  void add(const std::string& name, const KeyPath& key_path, std::string_view what) {
    if (!tessera::detail::is_valid_utf8(name)) {
      refuse(destination_, name, "name", "UTF-8", "other bytes");
    }
    const KeyPath path = key_path.empty() ? KeyPath{name} : key_path;
    std::string at;  // unambiguous, unlike the spelling
    for (std::size_t i = 0; i < path.size(); ++i) {
      const auto* text = std::get_if<std::string>(&path[i]);
      note(name, at, text != nullptr ? "a dict" : "a list", path, i);
      at += text != nullptr ? "s" + std::to_string(text->size()) + *text
                            : "i" + std::to_string(std::get<std::int64_t>(path[i])) + ";";
    }
    note(name, at, what, path, path.size());
  }

 private:
  void note(const std::string& name, const std::string& at, std::string_view what,
            const KeyPath& path, std::size_t num_steps) {
    const auto [it, is_new] = kinds_.emplace(at, what);
    if (is_new || it->second == what) return;
    const KeyPath front(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(num_steps));
    refuse(destination_, name, "key path", std::string(it->second) + " at " + spell(front),
           std::string(what));
  }

  const std::string& destination_;
  std::map<std::string, std::string_view> kinds_;
};

void check_contents(const std::string& destination, const CheckpointContents& contents) {
  KeyTree tree(destination);
  for (const auto& value : contents.values) tree.add(value.name, value.key_path, "a value");
  for (const TensorEntry& tensor : contents.tensors) {
    tree.add(tensor.meta.fqn, tensor.key_path, "a tensor");
  }
  if (!contents.aliases.empty()) {
    refuse(destination, contents.aliases.front().fqn, "alias", "a tensor of its own",
           "an alias of " + contents.aliases.front().target);
  }
  for (const ValueEntry& value : contents.values) {
    check_key_path(destination, value.name, value.key_path);
  }
  for (const TensorEntry& tensor : contents.tensors) {
    check_key_path(destination, tensor.meta.fqn, tensor.key_path);
    for (const Piece& piece : tensor.pieces) {
      if (!std::holds_alternative<Box>(piece.region)) {
        refuse(destination, tensor.meta.fqn, "piece", "a box", region_to_string(piece.region));
      }
      if (const auto problem = region_error(piece.region, tensor.meta.shape)) {
        throw Error(ErrorKind::invalid_argument, {.path = destination, .fqn = tensor.meta.fqn},
                    *problem);
      }
      if (piece.rank < 0 || piece.rank >= contents.world_size) {
        refuse(destination, tensor.meta.fqn, "rank of a piece",
               "below " + std::to_string(contents.world_size), std::to_string(piece.rank));
      }
    }
  }
}

/// Leaves one piece of each region: of replicas the one whose rank has the least to write so far.
/// An empty tensor keeps one empty piece, as DCP wants a chunk for it; other empty pieces go.
void choose_replicas(const std::string& destination, CheckpointContents& contents) {
  std::map<int, std::uint64_t> nbytes_of_rank;
  for (TensorEntry& tensor : contents.tensors) {
    const bool empty_tensor = tensor.meta.numel() == 0;
    if (empty_tensor) {
      const int rank = tensor.pieces.empty() ? 0 : tensor.pieces.front().rank;
      tensor.pieces = {{whole_box(tensor.meta.shape), rank}};
      continue;
    }
    std::map<Box, std::vector<int>> ranks_of;
    for (const Piece& piece : tensor.pieces) {
      if (numel_of(piece.region) != 0) ranks_of[std::get<Box>(piece.region)].push_back(piece.rank);
    }
    tensor.pieces.clear();
    const Box* before = nullptr;
    for (auto& [box, ranks] : ranks_of) {
      if (before != nullptr && before->offsets == box.offsets) {
        refuse(destination, tensor.meta.fqn, "pieces", "one box at each offset",
               region_to_string(*before) + " and " + region_to_string(box));
      }
      before = &box;
      const int rank = *std::ranges::min_element(
          ranks, {}, [&](int r) { return std::pair(nbytes_of_rank[r], r); });
      nbytes_of_rank[rank] += static_cast<std::uint64_t>(box.numel()) * itemsize(tensor.meta.dtype);
      tensor.pieces.push_back({box, rank});
    }
  }
}

/// Every item is a torch.save file within `__<rank>_0.distcp`, one after the other: first the
/// values, then the tensors' pieces. All places are known when this is made; an item's headers are
/// written with its last block, when its CRC is known. Thread-safe where CheckpointWriter is.
class DcpWriter final : public CheckpointWriter {
 public:
  DcpWriter(FileSystem& fs, std::string destination, CheckpointContents contents,
            std::vector<Value> values, OverwritePolicy overwrite);

  const CheckpointContents& contents() const override { return contents_; }
  std::vector<PieceId> write_order() const override;
  std::int64_t block_numel(PieceId piece) const override;
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override;
  void abandon() noexcept override {}  // nobody waits here
  void commit() override;

 private:
  /// A piece being written.
  struct Progress {
    std::uint64_t data_begin = 0;  // in its file
    std::int64_t blocks_left = 0;
    std::vector<std::uint32_t> block_crcs;
  };
  /// A file exists from its first block to its last piece's last.
  struct RankFile {
    std::string name;
    int rank = 0;
    std::uint64_t nbytes = 0;
    std::size_t pieces_left = 0;
    std::vector<std::size_t> empty_tensors;
    std::mutex mutex;  // guards the members below, and Progress of the pieces in this file
    std::unique_ptr<WritableFile> file;
    bool is_begun = false;  // its size, values and empty tensors are written
    bool is_finished = false;
  };

  void lay_out();
  RankFile& file_of(PieceId piece) { return *files_[storage_of(piece).file]; }
  const StorageInfo& storage_of(PieceId piece) const {
    return storage_.pieces[piece.tensor_index][piece.piece_index];
  }
  const Box& box_of(PieceId piece) const {
    return std::get<Box>(contents_.tensors[piece.tensor_index].pieces[piece.piece_index].region);
  }
  WritableFile& open(RankFile& file);
  void write_headers(WritableFile& out, PieceId piece, std::uint32_t crc);
  void finish(RankFile& file);

  FileSystem& fs_;
  CheckpointContents contents_;
  std::vector<Value> values_;
  Storage storage_;
  std::vector<std::vector<Progress>> progress_;   // parallel to contents_.tensors and their pieces
  std::vector<std::unique_ptr<RankFile>> files_;  // by rank; unique_ptr as a mutex cannot move
  StagedDestination staged_;
};

CheckpointContents checked(const std::string& destination, CheckpointContents contents) {
  check_contents(destination, contents);
  choose_replicas(destination, contents);
  contents.units.clear();
  contents.annotations.clear();
  return contents;
}

DcpWriter::DcpWriter(FileSystem& fs, std::string destination, CheckpointContents contents,
                     std::vector<Value> values, OverwritePolicy overwrite)
    : fs_(fs),
      contents_(checked(destination, std::move(contents))),
      values_(std::move(values)),
      staged_(fs, destination, DestinationKind::directory, overwrite) {
  TESSERA_CHECK(values_.size() == contents_.values.size());
  lay_out();
}

void DcpWriter::lay_out() {
  std::map<int, std::uint32_t> file_of_rank;
  if (!values_.empty()) file_of_rank[0];
  for (const TensorEntry& tensor : contents_.tensors) {
    for (const Piece& piece : tensor.pieces) file_of_rank[piece.rank];
  }
  for (auto& [rank, index] : file_of_rank) {
    index = static_cast<std::uint32_t>(files_.size());
    files_.push_back(std::make_unique<RankFile>());
    files_.back()->rank = rank;
    files_.back()->name = "__" + std::to_string(rank) + "_0.distcp";
    storage_.files.push_back(files_.back()->name);
  }
  const auto place = [&](std::uint32_t file, std::uint64_t nbytes, ByteRange data = {}) {
    StorageInfo info{file, files_[file]->nbytes, nbytes};
    if (data.nbytes() >= kMinPagedNbytes) {
      info.offset = round_up(info.offset + data.begin, kPageNbytes) - data.begin;
    }
    files_[file]->nbytes = info.offset + nbytes;
    return info;
  };

  for (const Value& value : values_) {
    storage_.values.push_back(place(0, torch_zip::torch_save_value(value).size()));
  }
  for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
    const TensorEntry& tensor = contents_.tensors[t];
    std::vector<StorageInfo>& places = storage_.pieces.emplace_back();
    std::vector<Progress>& progress = progress_.emplace_back();
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const Box& box = std::get<Box>(tensor.pieces[p].region);
      const TorchSaveLayout layout = torch_zip::tensor_save_layout(tensor.meta.dtype, box.sizes);
      const std::uint32_t file = file_of_rank[tensor.pieces[p].rank];
      places.push_back(place(file, layout.nbytes(), layout.storage_range(0)));
      Progress& piece = progress.emplace_back();
      piece.data_begin = places.back().offset + layout.storage_range(0).begin;
      if (box.numel() == 0) {
        files_[file]->empty_tensors.push_back(t);
        continue;
      }
      piece.blocks_left = ceil_div(box.numel(), block_numel({t, p}));
      ++files_[file]->pieces_left;
    }
  }
}

std::vector<CheckpointWriter::PieceId> DcpWriter::write_order() const {
  std::vector<PieceId> order;
  for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
    for (std::size_t p = 0; p < contents_.tensors[t].pieces.size(); ++p) {
      if (box_of({t, p}).numel() != 0) order.push_back({t, p});
    }
  }
  std::ranges::stable_sort(order, {}, [&](PieceId piece) { return storage_of(piece).file; });
  return order;
}

std::int64_t DcpWriter::block_numel(PieceId piece) const {
  return static_cast<std::int64_t>(kBlockNbytes /
                                   itemsize(contents_.tensors[piece.tensor_index].meta.dtype));
}

/// Creates the file with its values and empty tensors. Requires: `file.mutex` held.
WritableFile& DcpWriter::open(RankFile& file) {
  TESSERA_CHECK(!file.is_finished);
  if (file.is_begun) return *file.file;
  // A step that failed is tried again by the next thread, so that it does not tell of a failure
  // that only follows from the first.
  if (!file.file) file.file = fs_.create(join_path(staged_.staging_path(), file.name));
  WritableFile& out = *file.file;
  out.resize(file.nbytes);
  if (file.nbytes >= kMinUncachedFileNbytes) out.bypass_cache();
  if (file.rank == 0) {
    for (std::size_t v = 0; v < values_.size(); ++v) {
      const std::string bytes = torch_zip::torch_save_value(values_[v]);
      out.write_at(storage_.values[v].offset, std::as_bytes(std::span(bytes)));
    }
  }
  for (const std::size_t tensor : file.empty_tensors) write_headers(out, {tensor, 0}, 0);
  file.is_begun = true;
  return out;
}

void DcpWriter::write_headers(WritableFile& out, PieceId piece, std::uint32_t crc) {
  const TorchSaveLayout layout = torch_zip::tensor_save_layout(
      contents_.tensors[piece.tensor_index].meta.dtype, box_of(piece).sizes);
  for (const auto& [begin, bytes] : layout.parts_around_storages(std::span(&crc, 1))) {
    out.write_at(storage_of(piece).offset + begin, std::as_bytes(std::span(bytes)));
  }
}

void DcpWriter::write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) {
  const std::uint64_t element_nbytes = itemsize(contents_.tensors[piece.tensor_index].meta.dtype);
  const std::int64_t numel = box_of(piece).numel();
  const std::int64_t block = block_numel(piece);
  TESSERA_CHECK(begin % block == 0 && begin < numel);
  const std::uint64_t block_nbytes =
      static_cast<std::uint64_t>(std::min(block, numel - begin)) * element_nbytes;
  TESSERA_CHECK(bytes.size() == block_nbytes);

  RankFile& file = file_of(piece);
  Progress& progress = progress_[piece.tensor_index][piece.piece_index];
  const std::uint32_t block_crc = crc32(0, bytes);
  WritableFile* out = nullptr;
  {
    const std::lock_guard lock(file.mutex);
    out = &open(file);
  }
  out->write_at(progress.data_begin + static_cast<std::uint64_t>(begin) * element_nbytes, bytes);
  {
    const std::lock_guard lock(file.mutex);
    TESSERA_CHECK(progress.blocks_left > 0);
    progress.block_crcs.resize(static_cast<std::size_t>(ceil_div(numel, block)));
    progress.block_crcs[static_cast<std::size_t>(begin / block)] = block_crc;
    if (--progress.blocks_left > 0) return;
  }

  std::uint32_t crc = 0;
  std::int64_t left = numel;
  for (const std::uint32_t next : progress.block_crcs) {
    crc = crc32_combine(crc, next,
                        static_cast<std::uint64_t>(std::min(block, left)) * element_nbytes);
    left -= block;
  }
  std::vector<std::uint32_t>().swap(progress.block_crcs);
  write_headers(*out, piece, crc);
  {
    const std::lock_guard lock(file.mutex);
    if (--file.pieces_left > 0) return;
  }
  finish(file);
}

/// Requires: nobody writes to the file any more.
void DcpWriter::finish(RankFile& file) {
  file.file->sync();
  file.file->close();
  file.file.reset();
  file.is_finished = true;
}

void DcpWriter::commit() {
  for (const auto& file : files_) {
    TESSERA_CHECK(file->pieces_left == 0);
    if (file->is_finished) continue;
    const std::lock_guard lock(file->mutex);
    open(*file);
    finish(*file);
  }
  const std::string metadata = dcp::pickle_metadata(contents_, storage_);
  const auto out = fs_.create(join_path(staged_.staging_path(), dcp::kMetadataFile));
  out->write_at(0, std::as_bytes(std::span(metadata)));
  out->sync();
  out->close();
  staged_.commit();
}

}  // namespace

std::unique_ptr<CheckpointWriter> create_dcp(FileSystem& fs, std::string destination,
                                             CheckpointContents contents, std::vector<Value> values,
                                             OverwritePolicy overwrite) {
  return std::make_unique<DcpWriter>(fs, std::move(destination), std::move(contents),
                                     std::move(values), overwrite);
}

}  // namespace tessera::formats
