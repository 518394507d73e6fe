#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/checked_math.h"
#include "base/digest.h"
#include "formats/dcp.h"
#include "formats/dcp/dcp_parts.h"
#include "formats/dcp/metadata.h"
#include "formats/drivers.h"
#include "formats/key_paths.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/paged_data.h"
#include "formats/part_files.h"
#include "formats/per_rank.h"
#include "formats/piece_pool.h"
#include "formats/staging/file_syncs.h"
#include "formats/staging/staged_destination.h"
#include "formats/staging/staged_work.h"
#include "formats/staging/staged_writer.h"
#include "formats/torch_zip/saved_file_value.h"
#include "formats/torch_zip/state_dict_pickle.h"
#include "formats/torch_zip/torch_save_layout.h"
#include "formats/torch_zip/unwritten_file.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/shared_contents.h"

namespace tessera::formats {
namespace {

using dcp::Storage;
using dcp::StorageInfo;
using torch_zip::TorchSaveLayout;

constexpr std::uint64_t kBlockNbytes = std::uint64_t{4} << 20;

struct NumberHash {
  std::uint64_t operator()(std::uint32_t number) const { return number; }
};

[[noreturn]] void refuse(const std::string& destination, const std::string& fqn,
                         std::string_view rule, std::string_view expected, std::string_view found) {
  throw Error::expected(ErrorKind::invalid_argument, {.path = destination, .fqn = fqn}, rule,
                        expected, found);
}

std::string in_words(const Key& key) {
  const std::string text = printable(spell({key}));
  return std::holds_alternative<std::string>(key) ? "'" + text + "'" : text;
}

/// Throws if a dict has two keys that become the same text, such as 1 and "1": a reader could not
/// tell the entries under them apart.
void check_keys_as_text(const std::string& destination, const CheckpointContents& contents) {
  const auto is_other = [](const Key& key) { return std::holds_alternative<NonStringKey>(key); };
  const auto has_other = [&](const auto& entry) {
    return std::ranges::any_of(entry.key_path, is_other);
  };
  if (std::ranges::none_of(contents.tensors, has_other) &&
      std::ranges::none_of(contents.values, has_other)) {
    return;
  }
  std::map<std::vector<std::string>, Key> keys;  // by key path as text: its last key
  const auto add = [&](const std::string& name, const KeyPath& path) {
    std::vector<std::string> texts;
    for (const Key& key : path.empty() ? KeyPath{name} : path) {
      texts.push_back(spell({key}));
      const auto [known, is_new] = keys.emplace(texts, key);
      if (is_new || known->second == key) continue;
      throw Error::expected(ErrorKind::unsupported, {.path = destination, .fqn = name}, "keys",
                            "keys of a dict that differ as text, as DCP stores them",
                            in_words(known->second) + " and " + in_words(key),
                            "rename one of them, or choose another format");
    }
  };
  for (const TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn, tensor.key_path);
  for (const ValueEntry& value : contents.values) add(value.name, value.key_path);
}

void check_contents(const std::string& destination, const CheckpointContents& contents) {
  check_key_paths(contents, destination);
  check_keys_as_text(destination, contents);
  if (!contents.aliases.empty()) {
    const Alias& alias = contents.aliases.front();
    refuse(destination, alias.fqn, "tied tensors",
           "none (DCP cannot store ties; store the tensor under each of its names)",
           "a tie to '" + printable(alias.target) + "'");
  }
  for (const TensorEntry& tensor : contents.tensors) {
    if (tensor.meta.shape.size() > kMaxDims) {  // no reader of Tessera could open the checkpoint
      refuse(destination, tensor.meta.fqn, "shape",
             "at most " + std::to_string(kMaxDims) + " dimensions",
             std::to_string(tensor.meta.shape.size()) + " dimensions");
    }
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
               "a rank below " + std::to_string(contents.world_size), std::to_string(piece.rank));
      }
    }
  }
}

/// Returns one piece per region of a tensor: the replica on the rank that has the least to write so
/// far. An empty tensor keeps one empty piece, because DCP requires a chunk for it. Other empty
/// pieces are left out. Throws if two different regions begin at the same offsets.
std::vector<Piece> choose_pieces(const std::string& destination, const TensorEntry& tensor,
                                 std::map<int, std::uint64_t>& nbytes_of_rank) {
  if (tensor.meta.numel() == 0) {
    const int rank = tensor.pieces.empty() ? 0 : tensor.pieces.front().rank;
    return {{whole_box(tensor.meta.shape), rank}};
  }
  std::map<Box, std::vector<int>> ranks_of;
  for (const Piece& piece : tensor.pieces) {
    if (numel_of(piece.region) != 0) ranks_of[std::get<Box>(piece.region)].push_back(piece.rank);
  }
  std::vector<Piece> pieces;
  pieces.reserve(ranks_of.size());
  const Box* before = nullptr;
  for (const auto& [box, ranks] : ranks_of) {
    if (before != nullptr && before->offsets == box.offsets) {
      refuse(destination, tensor.meta.fqn, "pieces", "one box at each offset",
             region_to_string(*before) + " and " + region_to_string(box));
    }
    before = &box;
    const int rank = *std::ranges::min_element(
        ranks, {}, [&](int r) { return std::pair(nbytes_of_rank[r], r); });
    nbytes_of_rank[rank] += static_cast<std::uint64_t>(box.numel()) * itemsize(tensor.meta.dtype);
    pieces.push_back({box, rank});
  }
  return pieces;
}

/// Removes replicas (`choose_pieces`). Changes nothing, and copies nothing, if there are none.
void choose_replicas(const std::string& destination, SharedContents& contents) {
  std::map<int, std::uint64_t> nbytes_of_rank;
  PiecePool pool;
  for (std::size_t t = 0; t < contents->tensors.size(); ++t) {
    SharedVector<Piece> pieces = choose_pieces(destination, contents->tensors[t], nbytes_of_rank);
    if (pieces != contents->tensors[t].pieces) {
      contents.edit().tensors[t].pieces = pool.share(std::move(pieces));
    }
  }
}

/// The bytes to write, and their places in the files.
struct FileLayout {
  SharedContents contents;
  std::vector<Value> values;  // parallel to contents->values
  Storage storage;
  struct File {
    int rank = 0;
    std::uint64_t nbytes = 0;
  };
  std::vector<File> files;  // parallel to storage.files
  /// For each piece of each tensor: where its data begin in its item.
  std::vector<SharedVector<std::uint32_t>> data_begins;

  std::size_t number_of(CheckpointWriter::PieceId piece) const {
    return storage.pieces.first(piece.tensor_index) + piece.piece_index;
  }
};

/// The positions of a list that have entries.
struct ListPositions {
  std::set<std::int64_t> present;
  std::uint32_t dict_order = std::numeric_limits<std::uint32_t>::max();  // smallest of the entries
};

/// Adds the value None at each position that a list lacks before another one, as a torch.save file
/// has it there. PyTorch cannot load a list with a missing position. Leaves out the lists of single
/// ranks: None there would replace the item that all ranks share.
void fill_lists(const std::string& destination, SharedContents& contents,
                std::vector<Value>& values) {
  std::map<KeyPath, ListPositions> lists;  // by the list's key path
  const auto add = [&](const std::string& name, const auto& entry) {
    const KeyPath& path = entry.key_path;
    // The first key is never a position: the outermost list becomes a dict.
    for (std::size_t depth = 1; depth < path.size(); ++depth) {
      const auto* const position = std::get_if<std::int64_t>(&path[depth]);
      if (position == nullptr || parse_per_rank_name(name)) continue;
      const auto end = path.begin() + static_cast<std::ptrdiff_t>(depth);
      ListPositions& list = lists[KeyPath(path.begin(), end)];
      list.present.insert(*position);
      list.dict_order = std::min(list.dict_order, entry.dict_order);
    }
  };
  for (const TensorEntry& tensor : contents->tensors) add(tensor.meta.fqn, tensor);
  for (const ValueEntry& value : contents->values) add(value.name, value);

  std::map<std::string, std::pair<ValueEntry, Value>> filled;  // by name
  for (const auto& [list, positions] : lists) {
    const auto& [present, dict_order] = positions;
    const std::int64_t end = *present.rbegin();
    const std::int64_t most = torch_zip::kMaxHoles + std::ssize(present) - std::ssize(filled) - 1;
    if (end > most) {
      throw Error::expected(ErrorKind::unsupported,
                            {.path = destination, .fqn = spell(list) + "." + std::to_string(end)},
                            "position in a list",
                            "at most " + std::to_string(most) +
                                ", because too many positions before it have no entry",
                            std::to_string(end));
    }
    for (std::int64_t position = 0; position < end; ++position) {
      if (present.contains(position)) continue;
      KeyPath path = list;
      path.emplace_back(position);
      std::string name = spell(path);
      filled.emplace(name, std::pair(ValueEntry{name, std::move(path), dict_order}, Value()));
    }
  }
  if (filled.empty()) return;
  std::vector<ValueEntry>& entries = contents.edit().values;
  for (std::size_t v = 0; v < values.size(); ++v) {
    filled.insert_or_assign(entries[v].name, std::pair(entries[v], std::move(values[v])));
  }
  entries.clear();
  values.clear();
  for (auto& [name, value] : filled) {
    entries.push_back(std::move(value.first));
    values.push_back(std::move(value.second));
  }
}

SharedContents checked(const std::string& destination, SharedContents contents) {
  check_contents(destination, contents);
  choose_replicas(destination, contents);
  if (!contents->units.empty()) contents.edit().units.clear();
  if (!contents->annotations.empty()) contents.edit().annotations.clear();
  return contents;
}

/// Returns the item of a value: for an object of Megatron that was kept as a file, this file.
std::string item_of_value(const std::string& destination, const ValueEntry& entry,
                          const Value& value) {
  if (megatron::is_object(entry.name)) {
    const std::string_view file = torch_zip::saved_file_in(value, destination);
    if (!file.empty()) return std::string(file);
  }
  return torch_zip::torch_save_value(value);
}

/// Returns the size of the item of a value. Throws: Error with the name of a value that cannot be
/// pickled, or not be read back.
std::uint64_t value_nbytes(const std::string& destination, const ValueEntry& entry,
                           const Value& value) {
  try {
    torch_zip::require_readable(value);
    return item_of_value(destination, entry, value).size();
  } catch (const Error& error) {
    throw Error(error.kind(), {.path = destination, .fqn = entry.name},
                std::string(error.reason()));
  }
}

/// Throws if StorageInfo cannot name the place of an item.
void require_placeable(const std::string& destination, const std::string& fqn, std::uint32_t file,
                       std::uint64_t nbytes) {
  if (file >= StorageInfo::kMaxFiles) {
    refuse(destination, fqn, "files", "at most " + std::to_string(StorageInfo::kMaxFiles), "more");
  }
  if (nbytes > StorageInfo::kMaxNbytes) {
    refuse(destination, fqn, "size of a piece",
           "at most " + std::to_string(StorageInfo::kMaxNbytes) + " bytes",
           std::to_string(nbytes) + " bytes");
  }
}

/// Returns the place of each item. Items are torch.save files inside `__<rank>_0.distcp`, one after
/// the other: first the values, then the tensors' pieces. The bytes between two items are zero.
FileLayout lay_out(const std::string& destination, SharedContents contents,
                   std::vector<Value> values) {
  TESSERA_CHECK(values.size() == contents->values.size());
  fill_lists(destination, contents, values);
  FileLayout layout;
  layout.contents = checked(destination, std::move(contents));
  std::map<int, std::uint32_t> file_of_rank;
  if (!values.empty()) file_of_rank[0];
  for (const TensorEntry& tensor : layout.contents->tensors) {
    for (const Piece& piece : tensor.pieces) file_of_rank[piece.rank];
  }
  for (auto& [rank, index] : file_of_rank) {
    index = static_cast<std::uint32_t>(layout.files.size());
    layout.files.push_back({.rank = rank});
    layout.storage.files.push_back("__" + std::to_string(rank) + "_0.distcp");
  }
  const auto place = [&](const std::string& fqn, std::uint32_t file, std::uint64_t nbytes,
                         ByteRange data = {}) {
    require_placeable(destination, fqn, file, nbytes);
    StorageInfo info{.offset = layout.files[file].nbytes};
    info.nbytes = nbytes & StorageInfo::kMaxNbytes;
    info.file = file & (StorageInfo::kMaxFiles - 1);
    if (data.nbytes() >= kMinPagedNbytes) {
      info.offset = round_up(info.offset + data.begin, kPageNbytes) - data.begin;
    }
    layout.files[file].nbytes = info.offset + nbytes;
    return info;
  };

  for (std::size_t v = 0; v < values.size(); ++v) {
    const std::uint64_t nbytes = value_nbytes(destination, layout.contents->values[v], values[v]);
    layout.storage.values.push_back(place(layout.contents->values[v].name, 0, nbytes));
  }
  std::size_t num_pieces = 0;
  for (const TensorEntry& tensor : layout.contents->tensors) num_pieces += tensor.pieces.size();
  layout.storage.pieces.reserve(layout.contents->tensors.size(), num_pieces);
  layout.data_begins.reserve(layout.contents->tensors.size());
  tessera::detail::ListPool<std::uint32_t, NumberHash> pool;
  std::vector<std::uint32_t> data_begins;  // of one tensor
  for (const TensorEntry& tensor : layout.contents->tensors) {
    data_begins.clear();
    const std::span<StorageInfo> places = layout.storage.pieces.add(tensor.pieces.size());
    for (std::size_t p = 0; p < places.size(); ++p) {
      const Piece& piece = tensor.pieces[p];
      const TorchSaveLayout item =
          torch_zip::tensor_save_layout(tensor.meta.dtype, std::get<Box>(piece.region).sizes);
      const ByteRange data = item.storage_range(0);
      places[p] = place(tensor.meta.fqn, file_of_rank[piece.rank], item.nbytes(), data);
      TESSERA_CHECK(data.begin <= UINT32_MAX);
      data_begins.push_back(static_cast<std::uint32_t>(data.begin));
    }
    layout.data_begins.push_back(pool.share_copy(data_begins));
  }
  layout.values = std::move(values);
  return layout;
}

void write_metadata(WritableFile& out, const FileLayout& layout) {
  std::uint64_t position = 0;
  dcp::pickle_metadata(layout.contents, layout.storage, [&](std::string_view part) {
    out.write_at(position, std::as_bytes(std::span(part)));
    position += part.size();
  });
  out.sync();
  out.close();
}

/// Writes the files of the selected ranks into a directory. A derived class defines `commit`. The
/// place of every item is known from the start. An item's headers contain its CRC, so they are
/// written together with the item's last block. As thread-safe as CheckpointWriter.
class RankFilesWriter : public ShareWriter {
 public:
  /// File names end in `suffix`. `journal` may be null.
  RankFilesWriter(FileSystem& fs, std::string directory, FileLayout layout, RankSelection ranks,
                  std::string suffix, Journal* journal);

  const CheckpointContents& contents() const override { return layout_.contents; }
  std::span<const PieceId> write_order() const override { return order_; }
  std::int64_t block_numel(PieceId piece) const override;
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override;
  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override;
  void abandon() noexcept override {}  // no thread waits in this writer

  Unit unit() const override { return Unit::block; }
  std::size_t file_of(PieceId piece) const override { return storage_of(piece).file; }
  void adopt_block(PieceId piece, std::int64_t begin) override;
  void commit_share() override;

 protected:
  FileSystem& file_system() { return fs_; }
  const std::string& directory() const { return directory_; }
  const FileLayout& layout() const { return layout_; }
  const Journal* journal() const { return journal_; }
  /// Frees memory that is not needed after the last block.
  void forget_order() { order_ = {}; }
  /// Completes and syncs the files, and returns their final names (without a suffix for unfinished
  /// files). Requires: all blocks have been written.
  std::vector<std::string> finish_files();

 private:
  /// A file is open from its first block to the last block of its last piece.
  struct RankFile {
    std::string name;
    int rank = 0;
    std::uint64_t nbytes = 0;
    std::size_t pieces_left = 0;
    std::vector<std::size_t> empty_tensors;
    std::mutex mutex;  // guards the members below
    /// The CRCs of the blocks that are written, for a piece of several blocks.
    struct Blocks {
      std::vector<std::uint32_t> crcs{};
      std::vector<bool> are_written{};
      std::size_t num_written = 0;
    };
    std::unordered_map<std::size_t, Blocks> blocks;  // by the number of a piece
    std::unique_ptr<WritableFile> file;
    bool is_begun = false;  // the file's size, values and empty tensors are written
    bool is_finished = false;
  };

  RankFile& rank_file_of(PieceId piece) { return *files_[storage_of(piece).file]; }
  const StorageInfo& storage_of(PieceId piece) const {
    return layout_.storage.pieces[piece.tensor_index][piece.piece_index];
  }
  const TensorEntry& tensor_of(PieceId piece) const {
    return layout_.contents->tensors[piece.tensor_index];
  }
  const Piece& piece_of(PieceId piece) const { return tensor_of(piece).pieces[piece.piece_index]; }
  const Box& box_of(PieceId piece) const { return std::get<Box>(piece_of(piece).region); }
  std::string path_of(const RankFile& file) const {
    return join_path(directory_, file.name + suffix_);
  }
  ByteRange range_of(PieceId piece, std::int64_t begin, std::uint64_t nbytes) const;
  WritableFile& open(RankFile& file);
  void count_off(PieceId piece, std::int64_t begin, std::uint32_t block_crc);
  void write_headers(WritableFile& out, PieceId piece, std::uint32_t crc);
  void finish(RankFile& file);
  void set_order();

  FileSystem& fs_;
  const std::string directory_;
  const FileLayout layout_;
  const RankSelection ranks_;
  const std::string suffix_;
  Journal* const journal_;
  std::vector<PieceId> order_;
  /// Whether a piece is complete, by its number. One byte each: threads share no byte.
  std::vector<std::uint8_t> are_complete_;
  std::vector<std::unique_ptr<RankFile>> files_;  // by file; pointers, as a mutex cannot move
  FileSyncs syncs_;
};

RankFilesWriter::RankFilesWriter(FileSystem& fs, std::string directory, FileLayout layout,
                                 RankSelection ranks, std::string suffix, Journal* journal)
    : fs_(fs),
      directory_(std::move(directory)),
      layout_(std::move(layout)),
      ranks_(ranks),
      suffix_(std::move(suffix)),
      journal_(journal) {
  for (std::size_t file = 0; file < layout_.files.size(); ++file) {
    files_.push_back(std::make_unique<RankFile>());
    files_.back()->name = layout_.storage.files[file];
    files_.back()->rank = layout_.files[file].rank;
    files_.back()->nbytes = layout_.files[file].nbytes;
  }
  for (std::size_t t = 0; t < layout_.contents->tensors.size(); ++t) {
    const std::size_t num_pieces = layout_.contents->tensors[t].pieces.size();
    are_complete_.resize(are_complete_.size() + num_pieces);
    for (std::size_t p = 0; p < num_pieces; ++p) {
      const std::int64_t numel = box_of({t, p}).numel();
      if (numel == 0) {
        rank_file_of({t, p}).empty_tensors.push_back(t);
        continue;
      }
      ++rank_file_of({t, p}).pieces_left;
    }
  }
  set_order();
}

/// Sets the order of the pieces: file by file, within a file in the order of the contents.
void RankFilesWriter::set_order() {
  const auto for_each_written = [&](const auto& visit) {
    for (std::size_t t = 0; t < layout_.contents->tensors.size(); ++t) {
      for (std::size_t p = 0; p < layout_.contents->tensors[t].pieces.size(); ++p) {
        const bool is_own = ranks_.contains(piece_of({t, p}).rank);
        if (is_own && box_of({t, p}).numel() != 0) visit(PieceId{t, p});
      }
    }
  };
  std::vector<std::size_t> next(layout_.files.size() + 1);  // of each file: next place in order_
  for_each_written([&](PieceId piece) { ++next[storage_of(piece).file + 1]; });
  std::partial_sum(next.begin(), next.end(), next.begin());
  order_.resize(next.back());
  for_each_written([&](PieceId piece) { order_[next[storage_of(piece).file]++] = piece; });
}

std::int64_t RankFilesWriter::block_numel(PieceId piece) const {
  return static_cast<std::int64_t>(kBlockNbytes / itemsize(tensor_of(piece).meta.dtype));
}

/// Returns the open file. The first call creates it with its values and empty tensors. Requires:
/// `file.mutex` is held.
WritableFile& RankFilesWriter::open(RankFile& file) {
  TESSERA_CHECK(!file.is_finished);
  if (file.is_begun) return *file.file;
  // If a step fails, the next thread tries that step again. It then reports the same error as the
  // first thread, and not a follow-up error.
  if (!file.file) file.file = begin_file(fs_, journal_, path_of(file));
  WritableFile& out = *file.file;
  out.resize(file.nbytes);
  if (file.nbytes >= kMinUncachedFileNbytes) out.bypass_cache();
  if (file.rank == 0) {
    for (std::size_t v = 0; v < layout_.values.size(); ++v) {
      const std::string bytes =
          item_of_value(directory_, layout_.contents->values[v], layout_.values[v]);
      out.write_at(layout_.storage.values[v].offset, std::as_bytes(std::span(bytes)));
    }
  }
  for (const std::size_t tensor : file.empty_tensors) write_headers(out, {tensor, 0}, 0);
  file.is_begun = true;
  return out;
}

void RankFilesWriter::write_headers(WritableFile& out, PieceId piece, std::uint32_t crc) {
  const TorchSaveLayout item =
      torch_zip::tensor_save_layout(tensor_of(piece).meta.dtype, box_of(piece).sizes);
  for (const auto& [begin, bytes] : item.segments_around_storages(std::span(&crc, 1))) {
    out.write_at(storage_of(piece).offset + begin, std::as_bytes(std::span(bytes)));
  }
}

/// Returns the range of the block in its file.
ByteRange RankFilesWriter::range_of(PieceId piece, std::int64_t begin, std::uint64_t nbytes) const {
  TESSERA_CHECK(ranks_.contains(piece_of(piece).rank));
  const std::uint64_t element_nbytes = itemsize(tensor_of(piece).meta.dtype);
  const std::int64_t numel = box_of(piece).numel();
  const std::int64_t block = block_numel(piece);
  TESSERA_CHECK(begin % block == 0 && begin < numel);
  TESSERA_CHECK(nbytes ==
                static_cast<std::uint64_t>(std::min(block, numel - begin)) * element_nbytes);
  const std::uint64_t first = storage_of(piece).offset +
                              layout_.data_begins[piece.tensor_index][piece.piece_index] +
                              static_cast<std::uint64_t>(begin) * element_nbytes;
  return {first, first + nbytes};
}

void RankFilesWriter::write_block(PieceId piece, std::int64_t begin,
                                  std::span<const std::byte> bytes) {
  const ByteRange range = range_of(piece, begin, bytes.size());
  RankFile& file = rank_file_of(piece);
  const std::uint32_t block_crc = crc32(0, bytes);
  WritableFile* out = nullptr;
  {
    const std::lock_guard lock(file.mutex);
    out = &open(file);
  }
  out->write_at(range.begin, bytes);
  if (journal_ != nullptr) {
    journal_->note({piece, begin}, {.range = range, .checksum = block_crc});
  }
  count_off(piece, begin, block_crc);
}

bool RankFilesWriter::resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) {
  RankFile& file = rank_file_of(piece);
  const auto checksum = read_plain_block(journal_, {piece, begin}, path_of(file),
                                         range_of(piece, begin, room.size()), room);
  if (!checksum) return false;
  const std::uint32_t block_crc = crc32(0, room);
  if (block_crc != *checksum) return false;
  {
    const std::lock_guard lock(file.mutex);
    open(file);
  }
  count_off(piece, begin, block_crc);
  return true;
}

void RankFilesWriter::adopt_block(PieceId piece, std::int64_t begin) {
  RankFile& file = rank_file_of(piece);
  const std::int64_t numel =
      std::min(RankFilesWriter::block_numel(piece), box_of(piece).numel() - begin);
  const ByteRange range = range_of(
      piece, begin, static_cast<std::uint64_t>(numel) * itemsize(tensor_of(piece).meta.dtype));
  const FinishedBlock block = recorded_plain_block(journal_, {piece, begin}, path_of(file), range);
  {
    const std::lock_guard lock(file.mutex);
    open(file);
  }
  count_off(piece, begin, static_cast<std::uint32_t>(block.checksum));
}

void RankFilesWriter::commit_share() {
  for (const auto& file : files_) {
    if (file->file) syncs_.add(std::move(file->file));
  }
  syncs_.wait();
}

/// Counts a block that has been written. The last block of a piece completes its item; the last
/// item completes the file.
void RankFilesWriter::count_off(PieceId piece, std::int64_t begin, std::uint32_t block_crc) {
  const std::uint64_t element_nbytes = itemsize(tensor_of(piece).meta.dtype);
  const std::int64_t numel = box_of(piece).numel();
  const std::int64_t block = block_numel(piece);
  RankFile& file = rank_file_of(piece);
  const std::size_t number = layout_.number_of(piece);
  std::vector<std::uint32_t> block_crcs{block_crc};
  {
    const std::lock_guard lock(file.mutex);
    TESSERA_CHECK(are_complete_[number] == 0);
    if (numel > block) {
      auto& [crcs, are_written, num_written] = file.blocks[number];
      crcs.resize(static_cast<std::size_t>(ceil_div(numel, block)));
      are_written.resize(crcs.size());
      const auto place = static_cast<std::size_t>(begin / block);
      TESSERA_CHECK(!are_written[place]);
      are_written[place] = true;
      crcs[place] = block_crc;
      if (++num_written < crcs.size()) return;
      block_crcs = std::move(file.blocks.extract(number).mapped().crcs);
    }
    are_complete_[number] = 1;
  }

  std::uint32_t crc = 0;
  std::int64_t left = numel;
  for (const std::uint32_t next : block_crcs) {
    crc = crc32_combine(crc, next,
                        static_cast<std::uint64_t>(std::min(block, left)) * element_nbytes);
    left -= block;
  }
  write_headers(*file.file, piece, crc);
  {
    const std::lock_guard lock(file.mutex);
    TESSERA_CHECK(file.pieces_left > 0);
    if (--file.pieces_left > 0) return;
  }
  finish(file);
}

/// Requires: no thread writes to the file any more.
void RankFilesWriter::finish(RankFile& file) {
  syncs_.add(std::move(file.file));
  file.is_finished = true;
}

std::vector<std::string> RankFilesWriter::finish_files() {
  std::vector<std::string> names;
  for (const auto& file : files_) {
    if (!ranks_.contains(file->rank)) continue;
    TESSERA_CHECK(file->pieces_left == 0 && file->blocks.empty());
    names.push_back(file->name);
    if (file->is_finished) continue;
    const std::lock_guard lock(file->mutex);
    open(*file);
    finish(*file);
  }
  syncs_.wait();
  return names;
}

/// Writes all files, and `.metadata` last.
class DcpWriter final : public RankFilesWriter {
 public:
  DcpWriter(FileSystem& fs, std::string directory, FileLayout layout, RankSelection all_ranks,
            Journal* journal)
      : RankFilesWriter(fs, std::move(directory), std::move(layout), all_ranks, "", journal) {}

  void commit() override {
    finish_files();
    forget_order();
    const auto out =
        create_anew(file_system(), journal(), join_path(directory(), dcp::kMetadataFile));
    write_metadata(*out, layout());
  }
};

/// Writes the file of one rank. The file has a temporary name until `commit` renames it.
class DcpPartWriter final : public RankFilesWriter {
 public:
  DcpPartWriter(FileSystem& fs, std::string directory, FileLayout layout, int rank)
      : RankFilesWriter(fs, std::move(directory), std::move(layout), {rank, rank + 1},
                        kUncommittedSuffix, nullptr) {}

  void commit() override {
    for (const std::string& name : finish_files()) {
      const std::string path = join_path(directory(), name);
      file_system().rename(path + kUncommittedSuffix, path);
    }
  }
};

}  // namespace

namespace dcp {

std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank) {
  FileLayout layout = lay_out(directory, std::move(contents), std::move(values));
  return std::make_unique<DcpPartWriter>(fs, std::move(directory), std::move(layout), rank);
}

void require_parts(const FileSystem& fs, const std::string& directory, CheckpointContents contents,
                   const std::vector<Value>& values) {
  const FileLayout layout = lay_out(directory, std::move(contents), values);
  for (std::size_t file = 0; file < layout.files.size(); ++file) {
    const std::string path = join_path(directory, layout.storage.files[file]);
    if (!fs.kind_of(path)) {
      throw Error::expected(ErrorKind::corruption, {.path = path}, "part", "a file", "none",
                            "did one rank not finish its part?");
    }
    const std::uint64_t nbytes = fs.open(path)->nbytes();
    if (nbytes != layout.files[file].nbytes) {
      throw Error::expected(ErrorKind::corruption, {.path = path}, "file size",
                            std::to_string(layout.files[file].nbytes) + " bytes",
                            std::to_string(nbytes) + " bytes",
                            "did the ranks write different checkpoints?");
    }
  }
}

void finish_parts(FileSystem& fs, const std::string& directory, CheckpointContents contents,
                  const std::vector<Value>& values) {
  const FileLayout layout = lay_out(directory, std::move(contents), values);
  StagedDestination staged(fs, join_path(directory, kMetadataFile), DestinationKind::member_file,
                           OverwritePolicy::refuse);
  write_metadata(*fs.open_for_update(staged.staging_path()), layout);
  staged.commit();
}

}  // namespace dcp

namespace {

/// Returns the names of all files that are written.
std::set<std::string> file_names(const FileLayout& layout) {
  std::set<std::string> names(layout.storage.files.begin(), layout.storage.files.end());
  names.insert(dcp::kMetadataFile);
  return names;
}

std::unique_ptr<ShareWriter> start_dcp(FileSystem& fs, std::string destination,
                                       SharedContents contents, std::vector<Value> values,
                                       const WorkOptions& work) {
  FileLayout layout = lay_out(destination, std::move(contents), std::move(values));
  auto staged =
      std::make_unique<StagedWork>(fs, std::move(destination), DestinationKind::directory, work);
  staged->set_file_names(file_names(layout));
  const RankSelection all_ranks{0, std::max(layout.contents->world_size, 1)};
  auto writer = std::make_unique<DcpWriter>(fs, staged->staging_path(), std::move(layout),
                                            all_ranks, staged->journal());
  return std::make_unique<StagedWriter>(std::move(staged), std::move(writer));
}

}  // namespace

namespace dcp {

PreparedFiles prepare_files(const std::string& destination, SharedContents contents,
                            std::vector<Value> values) {
  auto layout =
      std::make_shared<FileLayout>(lay_out(destination, std::move(contents), std::move(values)));
  std::set<std::string> names = file_names(*layout);
  return {std::move(names),
          [layout = std::move(layout)](FileSystem& fs, std::string directory, Journal* journal) {
            const RankSelection all_ranks{0, std::max(layout->contents->world_size, 1)};
            return std::make_unique<DcpWriter>(fs, std::move(directory), std::move(*layout),
                                               all_ranks, journal);
          }};
}

}  // namespace dcp

namespace {

class DcpParts final : public PartsWriter {
 public:
  std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                                CheckpointContents contents,
                                                std::vector<Value> values, int rank,
                                                const PartOptions& /*options*/) const override {
    return dcp::create_part(fs, std::move(directory), std::move(contents), std::move(values), rank);
  }
  std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                           const CheckpointContents& contents, const std::vector<Value>& values,
                           const PartOptions& /*options*/) const override {
    dcp::require_parts(fs, directory, contents, values);
    return 0;
  }
  void seal_part(FileSystem& /*fs*/, const std::string& /*directory*/, int /*rank*/,
                 std::uint64_t /*token*/) const override {}
  void finish_parts(FileSystem& fs, const std::string& directory,
                    const CheckpointContents& contents,
                    const std::vector<Value>& values) const override {
    dcp::finish_parts(fs, directory, contents, values);
  }
};

class DcpFormatWriter final : public FormatWriter {
 public:
  Format format() const override { return Format::dcp; }

  std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                          SharedContents contents, std::vector<Value> values,
                                          const CreateOptions& options) const override {
    return start_dcp(fs, destination, std::move(contents), std::move(values),
                     work_options(options));
  }
  std::unique_ptr<ShareWriter> start_share(FileSystem& fs, const std::string& destination,
                                           SharedContents contents, std::vector<Value> values,
                                           const CreateOptions& options,
                                           const ShareOptions& share) const override {
    return start_dcp(fs, destination, std::move(contents), std::move(values),
                     work_options(options, share));
  }
  void check_staging(FileSystem& fs, const std::string& destination,
                     const CheckpointContents& contents, const std::vector<Value>& values,
                     const CreateOptions& options) const override {
    const FileLayout layout = lay_out(destination, SharedContents::of(contents), values);
    dcp::pickle_metadata(layout.contents, layout.storage, [](std::string_view) {});
    StagedWork::check(fs, destination, DestinationKind::directory, work_options(options),
                      file_names(layout));
  }
  const PartsWriter* parts() const override {
    static const DcpParts parts;
    return &parts;
  }
};

}  // namespace

const FormatWriter& dcp_writer() {
  static const DcpFormatWriter writer;
  return writer;
}

std::unique_ptr<CheckpointWriter> create_dcp(FileSystem& fs, std::string destination,
                                             CheckpointContents contents, std::vector<Value> values,
                                             OverwritePolicy overwrite) {
  return start_dcp(fs, std::move(destination), std::move(contents), std::move(values),
                   {overwrite, {}});
}

}  // namespace tessera::formats
