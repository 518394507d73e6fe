#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/list_of_lists.h"
#include "base/once.h"
#include "base/outside_failure.h"
#include "formats/dcp.h"
#include "formats/dcp/item.h"
#include "formats/dcp/metadata.h"
#include "formats/dcp/nested_tensors.h"
#include "formats/expansion_limit.h"
#include "formats/known_ranges.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/name_pattern.h"
#include "formats/numbered_names.h"
#include "formats/open_files.h"
#include "formats/opened_classes.h"
#include "formats/part_of_check.h"
#include "formats/partly_read.h"
#include "formats/recently_used.h"
#include "formats/simplified_values.h"
#include "formats/torch_zip/torch_archive.h"
#include "object_store/files.h"
#include "object_store/url.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/base/parallel.h"

namespace tessera::formats {
namespace {

using dcp::Chunk;
using dcp::Item;
using dcp::StorageInfo;
using torch_zip::Leaf;
using torch_zip::TensorRecord;
using torch_zip::TorchArchive;

constexpr std::uint64_t kMaxMetadataNbytes = std::uint64_t{1} << 30;
// How many file objects and chunks a reader keeps for reuse. open_kept limits how many files are
// really open.
constexpr std::size_t kMaxFiles = 4096;
constexpr std::size_t kMaxChunks = 256;

std::string describe(DType dtype, std::span<const std::int64_t> shape) {
  return std::string(dtype_name(dtype)) + " " + shape_to_string(shape);
}

ByteRange window_of(const StorageInfo& info) {
  return {info.offset, info.offset + info.nbytes};
}

/// Throws if the item is stored as SerializationFormat.SAFETENSORS stores it. Such an item begins
/// with the length of a header in 8 bytes, then the header, which is JSON.
void refuse_safetensors(const ReadableFile& file, const StorageInfo& info) {
  std::array<std::byte, 10> begin{};
  if (info.offset > file.nbytes() || file.nbytes() - info.offset < begin.size()) return;
  file.read_at(info.offset, begin);
  constexpr std::string_view kEndOfLengthAndHeader("\0\0\0\0{\"", 6);
  const std::string_view text(reinterpret_cast<const char*>(begin.data()), begin.size());
  if (!text.ends_with(kEndOfLengthAndHeader)) return;
  throw Error::expected(
      ErrorKind::unsupported, {.path = file.path(), .byte_range = window_of(info)}, "item",
      "a torch.save file", "safetensors",
      "saved with SerializationFormat.SAFETENSORS, which PyTorch cannot load either; save again "
      "with TORCH_SAVE, or with HuggingFaceStorageWriter");
}

/// A tensor's item that holds what Tessera does not read, such as an object of a class. Not damage.
class RefusedObject : public Error {
 public:
  explicit RefusedObject(const Error& error) : Error(error) {}
};

/// Whether a program other than torch wrote the archive: torch never compresses.
bool has_compressed_member(const zip::ZipReader& zip) {
  return std::ranges::any_of(zip.members(), [](const zip::Member& member) {
    return member.compression != zip::Compression::stored;
  });
}

class ItemCheck;

class DcpReader final : public DividedReader,
                        public PartlyRead,
                        public KnownRanges,
                        public SimplifiedValues {
 public:
  /// `keeps`: empty, or as in open_dcp_values.
  DcpReader(const FileSystem& fs, std::string path, std::vector<std::string> as_dict,
            const std::function<bool(std::string_view)>& keeps = {})
      : fs_(fs), path_(std::move(path)), as_dict_(std::move(as_dict)) {
    const bool is_of_one_rank = fs_.kind_of(path_) == FileKind::regular;
    directory_ = is_of_one_rank ? directory_of(path_) : path_;
    const std::string file_path = is_of_one_rank ? path_ : join_path(path_, dcp::kMetadataFile);
    const auto file = fs_.open(file_path);
    if (file->nbytes() > kMaxMetadataNbytes) {
      throw Error::expected(ErrorKind::corruption, {.path = file_path}, "file size",
                            "at most " + std::to_string(kMaxMetadataNbytes) + " bytes",
                            std::to_string(file->nbytes()));
    }
    metadata_ = dcp::parse_metadata(pickle::PickleBytes(*file), file_path);
    if (keeps) keep_only_values(keeps);
    if (is_of_one_rank) metadata_.contents.part = part_by_names_beside(fs_, path_);
    refuse_objects();
    const auto& values = metadata_.contents.values;
    if (!metadata_.is_flattened ||
        std::ranges::any_of(values, megatron::is_object, &ValueEntry::name)) {
      nested_ = dcp::take_values_apart(metadata_, file_path,
                                       [&](const StorageInfo& info) { return open_item(info); });
    }
    count_opened_classes();
  }

  Format format() const override { return Format::dcp; }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return metadata_.contents; }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    if (range.numel() == 0) return;
    require_within_limit(tensor_index);
    const auto chunk = chunk_at(tensor_index, piece_index);
    chunk->item->archive.read_elements(
        chunk->record, metadata_.contents.tensors[tensor_index].meta.fqn, range, out);
    if (nested_.tensors.contains(tensor_index)) return;  // its item stays open
    checks_of_chunks_.keep(key_of_chunk(tensor_index, piece_index), chunk->item->archive.checks());
  }

  Value read_value(std::size_t value_index) const override;
  std::vector<Simplification> simplifications_of_value(std::size_t value_index) const override {
    // If the state dict was not flattened, opening has read the values.
    if (!metadata_.is_flattened || nested_.values.contains(value_index)) return {};
    return open_item(metadata_.storage.values[value_index])->archive.flatten().simplifications;
  }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override;
  std::optional<KnownRange> known_range(std::size_t tensor_index,
                                        std::size_t piece_index) const override {
    const StorageInfo& info = metadata_.storage.pieces[tensor_index][piece_index];
    return KnownRange{join_path(directory_, metadata_.storage.files[info.file]),
                      ByteRange{info.offset, info.offset + info.nbytes}};
  }
  std::vector<std::string> data_files() const override;
  MissingData find_missing_data() const override;
  void check_files(const FindingSink& sink) const override;
  void check_rest(const RestOptions& options) const override;
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override;

 private:
  std::shared_ptr<const ReadableFile> open_file(std::uint32_t file) const;
  std::shared_ptr<const ReadableFile> open_file_of(const StorageInfo& info) const;
  std::shared_ptr<const Item> open_item(
      const StorageInfo& info, std::shared_ptr<torch_zip::StorageChecks> checks = {}) const;
  static std::uint64_t key_of_chunk(std::size_t tensor_index, std::size_t piece_index) {
    return (std::uint64_t{tensor_index} << 32) | piece_index;
  }
  const Error* refusal_of_tensor(std::size_t value_index) const;
  Value open_value(std::size_t value_index) const;
  std::unique_ptr<Chunk> open_chunk(const TensorEntry& tensor, const Box& box,
                                    const StorageInfo& info,
                                    std::shared_ptr<torch_zip::StorageChecks> checks = {}) const;
  std::shared_ptr<const Chunk> chunk_at(std::size_t tensor_index, std::size_t piece_index) const;
  void verify_value(std::size_t value_index, ItemCheck& check) const;
  void verify_nested(const std::vector<bool>& is_readable, ItemCheck& check,
                     PartOfCheck& part) const;
  void keep_only_values(const std::function<bool(std::string_view)>& keeps);
  void count_opened_classes();
  std::optional<Error> refusal_of_object(const TensorEntry& tensor, std::size_t piece,
                                         const StorageInfo& info) const;
  void refuse_objects();
  /// Whether `path_` is the directory of all ranks, and not the metadata file of one rank.
  bool is_whole() const { return directory_ == path_; }
  bool describes_more_than_items() const;
  std::uint64_t stored_nbytes() const;
  void require_within_limit(std::size_t tensor_index) const;

  const FileSystem& fs_;
  std::string path_;
  std::string directory_;  // of the data files
  std::vector<std::string> as_dict_;
  dcp::Metadata metadata_;
  /// Of refused tensors, by the index of the value: all items but the first, which is the value's.
  std::vector<std::pair<std::size_t, StorageInfo>> more_refused_items_;
  mutable tessera::detail::Once limit_found_;
  mutable std::uint64_t limit_nbytes_ = 0;    // of all tensors (expansion_limit.h)
  mutable std::set<std::size_t> over_limit_;  // tensors
  dcp::NestedTensors nested_;
  mutable RecentlyUsed<std::uint32_t, ReadableFile> files_{kMaxFiles};
  // By `key_of_chunk`.
  mutable RecentlyUsed<std::uint64_t, Chunk> chunks_{kMaxChunks};
  mutable torch_zip::ChecksOfFiles checks_of_chunks_;
};

std::shared_ptr<const ReadableFile> DcpReader::open_file(std::uint32_t file) const {
  return files_.get(file, [&] {
    const std::string& name = metadata_.storage.files[file];
    const std::string file_path = join_path(directory_, name);
    if (!fs_.kind_of(file_path)) {
      throw Error::expected(ErrorKind::not_found, {.path = file_path}, "file",
                            "the file that .metadata names", "none", "an incomplete copy?");
    }
    require_contained(fs_, directory_, name);
    return open_kept(fs_, file_path);
  });
}

/// Returns the file that holds an item. Throws if the file is too short for the item.
std::shared_ptr<const ReadableFile> DcpReader::open_file_of(const StorageInfo& info) const {
  auto file = open_file(info.file);
  const ByteRange window = window_of(info);
  if (window.end > file->nbytes()) {
    throw Error::expected(ErrorKind::corruption, {.path = file->path(), .byte_range = window},
                          "file size", "at least " + std::to_string(window.end) + " bytes",
                          std::to_string(file->nbytes()), "an incomplete copy?");
  }
  return file;
}

/// Opens an item. `checks`: the checks of earlier reads of this item, if it was open before.
std::shared_ptr<const Item> DcpReader::open_item(
    const StorageInfo& info, std::shared_ptr<torch_zip::StorageChecks> checks) const {
  auto file = open_file_of(info);
  refuse_safetensors(*file, info);
  auto item = std::make_shared<Item>(std::move(file), window_of(info), as_dict_);
  if (checks) item->archive.continue_checks(std::move(checks));
  return item;
}

std::unique_ptr<Chunk> DcpReader::open_chunk(
    const TensorEntry& tensor, const Box& box, const StorageInfo& info,
    std::shared_ptr<torch_zip::StorageChecks> checks) const {
  std::shared_ptr<const Item> item = open_item(info, std::move(checks));
  std::vector<Leaf> leaves = item->archive.leaves();
  const auto refuse = [&](const std::string& found) {
    throw Error::expected(ErrorKind::corruption,
                          {.path = item->file->path(), .byte_range = item->archive.zip().window()},
                          "stored chunk", describe(tensor.meta.dtype, box.sizes), found,
                          ".metadata of another save?");
  };
  if (leaves.size() == 1) {
    if (const auto* refusal = std::get_if<Error>(&leaves.front().content)) {
      if (has_compressed_member(item->archive.zip())) throw Error(*refusal);
      throw RefusedObject(*refusal);
    }
  }
  const bool is_tensor = leaves.size() == 1 && leaves.front().path.empty() &&
                         std::holds_alternative<TensorRecord>(leaves.front().content);
  if (!is_tensor) refuse("no tensor");
  TensorRecord record = std::get<TensorRecord>(std::move(leaves.front().content));
  if (record.dtype != tensor.meta.dtype || record.shape != box.sizes) {
    refuse(describe(record.dtype, record.shape));
  }
  return std::make_unique<Chunk>(Chunk{std::move(item), std::move(record)});
}

std::shared_ptr<const Chunk> DcpReader::chunk_at(std::size_t tensor_index,
                                                 std::size_t piece_index) const {
  if (const auto nested = nested_.tensors.find(tensor_index); nested != nested_.tensors.end()) {
    return nested->second;
  }
  const TensorEntry& tensor = metadata_.contents.tensors[tensor_index];
  const std::uint64_t key = key_of_chunk(tensor_index, piece_index);
  try {
    return chunks_.get(key, [&] {
      return open_chunk(tensor, std::get<Box>(tensor.pieces[piece_index].region),
                        metadata_.storage.pieces[tensor_index][piece_index],
                        checks_of_chunks_.of(key));
    });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unsupported || error.remedy()) {
      throw error.at_tensor(tensor.meta.fqn);
    }
    throw Error(error.kind(), error.at_tensor(tensor.meta.fqn).where(), error.reason(),
                {Remedy::Action::leave_out, pattern_of(metadata_.contents, tensor.meta.fqn)});
  }
}

void DcpReader::check_rest(const RestOptions& options) const {
  for (const auto& [tensor_index, chunk] : nested_.tensors) {
    chunk->item->archive.check_rest(options);
  }
  for (const std::uint64_t key : checks_of_chunks_.files_to_check(options.most_rest)) {
    const StorageInfo& info = metadata_.storage.pieces[key >> 32][key & 0xffffffff];
    try {
      open_item(info, checks_of_chunks_.of(key))->archive.check_rest(options);
    } catch (const Error& error) {
      throw error.at_tensor(metadata_.contents.tensors[key >> 32].meta.fqn);
    }
  }
}

/// If the item of a piece holds an object of a class, returns why it is refused.
std::optional<Error> DcpReader::refusal_of_object(const TensorEntry& tensor, std::size_t piece,
                                                  const StorageInfo& info) const {
  try {
    open_chunk(tensor, std::get<Box>(tensor.pieces[piece].region), info);
  } catch (const RefusedObject& refusal) {
    return refusal.at_tensor(tensor.meta.fqn);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
  }
  return std::nullopt;
}

/// Turns each tensor whose items hold an object of a class, such as the 8-bit state of torchao's
/// optimizers, into a refused value, as such a tensor is in a file of torch.save. `.metadata` does
/// not name the class: it has the shape and dtype that the object stands for. So opens the items
/// that have fewer bytes than their chunks; torch writes no others. If one of them is refused,
/// opens all small items, too, in which the pickle is larger than what an object saves. Items that
/// cannot be opened for another reason stay: reading them later throws.
void DcpReader::refuse_objects() {
  CheckpointContents& contents = metadata_.contents;
  dcp::Storage& storage = metadata_.storage;
  std::map<std::size_t, Error> refusals;  // by tensor
  const auto look_at = [&](const auto& is_suspect) {
    std::vector<std::pair<std::size_t, std::size_t>> suspects;  // tensor and piece
    for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
      const TensorEntry& tensor = contents.tensors[t];
      for (std::size_t p = 0; p < tensor.pieces.size() && !refusals.contains(t); ++p) {
        const std::uint64_t nbytes = nbytes_of(tensor.pieces[p].region, tensor.meta.dtype);
        if (nbytes > 0 && is_suspect(storage.pieces[t][p].nbytes, nbytes)) {
          suspects.emplace_back(t, p);
        }
      }
    }
    std::vector<std::optional<Error>> found(suspects.size());
    const int num_threads = object_store::is_url(path_) ? object_store::kNumThreadsForUrls : 1;
    parallel_for(static_cast<std::int64_t>(suspects.size()), num_threads, {}, [&](std::int64_t i) {
      const auto [t, p] = suspects[static_cast<std::size_t>(i)];
      found[static_cast<std::size_t>(i)] =
          refusal_of_object(contents.tensors[t], p, std::as_const(storage.pieces)[t][p]);
    });
    for (std::size_t i = 0; i < suspects.size(); ++i) {
      if (found[i]) refusals.emplace(suspects[i].first, *found[i]);
    }
    return !refusals.empty();
  };
  constexpr std::uint64_t kMaxSmallItemNbytes = std::uint64_t{64} << 10;
  const auto is_smaller = [](std::uint64_t item, std::uint64_t chunk) { return item < chunk; };
  const auto is_small = [](std::uint64_t item, std::uint64_t) {
    return item < kMaxSmallItemNbytes;
  };
  if (!look_at(is_smaller)) return;
  look_at(is_small);

  struct StoredValue {
    ValueEntry entry;
    std::vector<StorageInfo> places;
  };
  std::vector<StoredValue> values;
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    values.push_back({std::move(contents.values[v]), {storage.values[v]}});
  }
  std::vector<TensorEntry> tensors;
  tessera::detail::ListOfLists<StorageInfo> pieces;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    TensorEntry& tensor = contents.tensors[t];
    const std::span<const StorageInfo> places = std::as_const(storage.pieces)[t];
    const auto refusal = refusals.find(t);
    if (refusal == refusals.end()) {
      tensors.push_back(std::move(tensor));
      pieces.add(places);
      continue;
    }
    metadata_.refused_tensors.emplace(tensor.meta.fqn, refusal->second);
    values.push_back({{tensor.meta.fqn, std::move(tensor.key_path), tensor.dict_order},
                      {places.begin(), places.end()}});
  }
  std::ranges::sort(values, {}, [](const StoredValue& value) { return value.entry.name; });
  contents.tensors = std::move(tensors);
  storage.pieces = std::move(pieces);
  contents.values.clear();
  storage.values.clear();
  for (auto& [entry, places] : values) {
    for (std::size_t i = 1; i < places.size(); ++i) {
      more_refused_items_.emplace_back(contents.values.size(), places[i]);
    }
    contents.values.push_back(std::move(entry));
    storage.values.push_back(places.front());
  }
}

/// Whether some chunk has more bytes than its item, or shares its item with another chunk. PyTorch
/// never does this: it writes each whole chunk into an item of its own.
bool DcpReader::describes_more_than_items() const {
  const auto for_each_chunk = [&](const auto& visit) {
    for (std::size_t t = 0; t < metadata_.contents.tensors.size(); ++t) {
      if (nested_.tensors.contains(t)) continue;  // its limit was checked when the item was opened
      const TensorEntry& tensor = metadata_.contents.tensors[t];
      for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
        visit(nbytes_of(tensor.pieces[p].region, tensor.meta.dtype),
              metadata_.storage.pieces[t][p]);
      }
    }
  };
  // Most writers put the items of a file in the order of the tensors. Then no two chunks share an
  // item, and no list of all items is needed.
  std::vector<std::uint64_t> next_offsets(metadata_.storage.files.size());
  bool are_in_order = true;
  bool is_more = false;
  std::size_t num_items = 0;
  for_each_chunk([&](std::uint64_t nbytes, const StorageInfo& info) {
    is_more = is_more || nbytes > info.nbytes;
    if (nbytes == 0) return;
    ++num_items;
    are_in_order = are_in_order && info.offset >= next_offsets[info.file];
    next_offsets[info.file] = info.offset + 1;
  });
  if (is_more || are_in_order) return is_more;
  std::vector<std::pair<std::uint32_t, std::uint64_t>> items;
  items.reserve(num_items);
  for_each_chunk([&](std::uint64_t nbytes, const StorageInfo& info) {
    if (nbytes > 0) items.emplace_back(info.file, info.offset);
  });
  std::ranges::sort(items);
  return std::ranges::adjacent_find(items) != items.end();
}

/// Returns the size of all files that exist, together. Units: bytes.
std::uint64_t DcpReader::stored_nbytes() const {
  std::uint64_t nbytes = 0;
  for (const std::string& name : metadata_.storage.files) {
    const std::string file = join_path(directory_, name);
    if (fs_.kind_of(file)) nbytes += fs_.open(file)->nbytes();
  }
  return nbytes;
}

/// If `describes_more_than_items`, all tensors together may have max_tensor_nbytes; otherwise there
/// is no limit. The limit is given to the tensors in the order of their names. Throws if what is
/// left for this tensor is not enough.
void DcpReader::require_within_limit(std::size_t tensor_index) const {
  const auto& tensors = metadata_.contents.tensors;
  limit_found_.run([&] {
    if (!describes_more_than_items()) return;
    limit_nbytes_ = max_tensor_nbytes(stored_nbytes());
    std::uint64_t left = limit_nbytes_;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const std::uint64_t nbytes = tensors[t].meta.nbytes();
      if (nbytes > left) over_limit_.insert(t);
      if (nbytes <= left) left -= nbytes;
    }
  });
  if (!over_limit_.contains(tensor_index)) return;
  const TensorMeta& meta = tensors[tensor_index].meta;
  throw Error::expected(ErrorKind::unsupported, {.path = path_, .fqn = meta.fqn}, "expanded size",
                        "at most " + std::to_string(limit_nbytes_) +
                            " bytes in all tensors together, the limit for files of this size",
                        std::to_string(meta.nbytes()) + " more in this tensor",
                        {Remedy::Action::leave_out, pattern_of(metadata_.contents, meta.fqn)});
}

/// Drops all tensors, and the values that `keeps` refuses, before anything opens their items.
void DcpReader::keep_only_values(const std::function<bool(std::string_view)>& keeps) {
  CheckpointContents& contents = metadata_.contents;
  contents.tensors.clear();
  metadata_.storage.pieces = {};
  const std::vector<ValueEntry> values = std::exchange(contents.values, {});
  const std::vector<StorageInfo> places = std::exchange(metadata_.storage.values, {});
  for (std::size_t v = 0; v < values.size(); ++v) {
    if (!keeps(values[v].name)) continue;
    contents.values.push_back(values[v]);
    metadata_.storage.values.push_back(places[v]);
  }
}

/// Counts the objects that are read as dicts. If the caller asked for classes (`as_dict`), reads
/// all values: only the items themselves name the classes of their objects.
void DcpReader::count_opened_classes() {
  OpenedClassSum opened;
  for (const dcp::NestedValue& nested : nested_.taken_apart) opened.add(nested.opened_classes);
  for (std::size_t v = 0; v < metadata_.storage.values.size(); ++v) {
    if (as_dict_.empty() || nested_.values.contains(v)) continue;
    try {
      opened.add(open_item(metadata_.storage.values[v])->archive.classes_in_value());
    } catch (const Error& error) {  // a later read of the value reports this error
      if (tessera::detail::is_outside_failure(error)) throw;
    }
  }
  metadata_.contents.opened_classes = opened.classes();
}

/// Returns the error if the value stands for a tensor that Tessera does not read, otherwise null.
const Error* DcpReader::refusal_of_tensor(std::size_t value_index) const {
  const auto& refused = metadata_.refused_tensors;
  const auto refusal = refused.find(metadata_.contents.values[value_index].name);
  return refusal == refused.end() ? nullptr : &refusal->second;
}

Value DcpReader::open_value(std::size_t value_index) const {
  if (const auto nested = nested_.values.find(value_index); nested != nested_.values.end()) {
    if (const auto* refusal = std::get_if<Error>(&nested->second)) throw Error(*refusal);
    return std::get<Value>(nested->second);
  }
  if (const Error* refusal = refusal_of_tensor(value_index)) throw Error(*refusal);
  return open_item(metadata_.storage.values[value_index])->archive.as_value();
}

Value DcpReader::read_value(std::size_t value_index) const {
  try {
    return open_value(value_index);
  } catch (const Error& error) {
    throw error.at_tensor(metadata_.contents.values[value_index].name);
  }
}

PieceStorage DcpReader::piece_storage(std::size_t tensor_index, std::size_t piece_index) const {
  const StorageInfo& info = metadata_.storage.pieces[tensor_index][piece_index];
  const auto chunk = chunk_at(tensor_index, piece_index);
  const ByteRange stored = chunk->item->archive.stored_range(chunk->record);
  PieceStorage storage{.file = metadata_.storage.files[info.file],
                       .byte_range = std::nullopt,
                       .encoding = std::string(chunk->item->archive.encoding()),
                       .stored_nbytes = stored.nbytes()};
  if (torch_zip::is_contiguous(chunk->record) && !stored.empty()) storage.byte_range = stored;
  return storage;
}

/// Checks the CRCs of all members of items. Counts the members that have no CRC.
class ItemCheck {
 public:
  ItemCheck(const std::string& path, const FindingSink& sink, const ProgressSink& progress)
      : sink_(sink),
        progress_(progress),
        absent_{.kind = CountedNote::Kind::absent_crcs, .path = path},
        foreign_{.kind = CountedNote::Kind::foreign_names, .path = path} {}

  /// Checks the item that `open` returns.
  template <class Open>
  void check(const std::string& name, const Open& open) {
    try {
      const auto item = open();
      check_members(name, item->archive.zip());
      add_foreign_names(item->archive);
    } catch (const RefusedObject& refusal) {
      report_refused_value(refusal.at_tensor(name));
    } catch (const Error& error) {
      report_structure(error.at_tensor(name));
    }
  }

  void add_foreign_names(const TorchArchive& archive) {
    add_foreign_names(archive.foreign_names());
  }
  void add_foreign_names(const std::vector<std::string>& names) {
    for (const std::string& name : names) foreign_.add_name(name);
  }

  void check_members(const std::string& name, const zip::ZipReader& zip) {
    for (std::size_t m = 0; m < zip.members().size(); ++m) check_member(name, zip, m);
  }

  /// Reports a value that Tessera does not read. This is not damage: PyTorch has written it.
  void report_refused_value(const Error& refusal) {
    sink_({.severity = Finding::Severity::note,
           .rule = "value",
           .where = refusal.where(),
           .expected = "a value of plain types",
           .found = std::string(refusal.reason())});
  }

  void report_structure(const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw error;
    sink_({.severity = Finding::Severity::error,
           .rule = "structure",
           .where = error.where(),
           .expected = "an item as .metadata describes it",
           .found = std::string(error.reason())});
  }

  void report_sums(PartOfCheck& part) {
    part.report(std::move(foreign_), sink_);
    part.report(std::move(absent_), sink_);
  }

 private:
  void check_member(const std::string& name, const zip::ZipReader& zip, std::size_t m) {
    const zip::Member& member = zip.members()[m];
    const std::uint32_t crc = zip.compute_crc(m, progress_);
    ++absent_.num_members;
    if (!member.has_crc()) {
      ++absent_.num_without_crc;
    } else if (crc != member.crc32) {
      sink_({.severity = Finding::Severity::error,
             .rule = "checksum",
             .where = {.path = zip.path(), .fqn = name, .byte_range = zip.data_range(m)},
             .expected =
                 "CRC-32 " + zip::crc_text(member.crc32) + " of '" + std::string(member.name) + "'",
             .found = zip::crc_text(crc)});
    }
  }

  const FindingSink& sink_;
  const ProgressSink& progress_;
  CountedNote absent_;
  CountedNote foreign_;
};

MissingData DcpReader::find_missing_data() const {
  const CheckpointContents& contents = metadata_.contents;
  const dcp::Storage& storage = metadata_.storage;
  std::vector<bool> is_lost;
  for (const std::string& name : storage.files) {
    is_lost.push_back(!fs_.kind_of(join_path(directory_, name)));
  }
  MissingData missing;
  if (std::ranges::find(is_lost, true) == is_lost.end()) return missing;
  for (std::size_t v = 0; v < storage.values.size(); ++v) {
    const std::uint32_t file = storage.values[v].file;
    if (is_lost[file]) missing.values.emplace(v, storage.files[file]);
  }
  for (const auto& [v, place] : more_refused_items_) {
    if (is_lost[place.file]) missing.values.emplace(v, storage.files[place.file]);
  }
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    for (std::size_t p = 0; p < storage.pieces[t].size(); ++p) {
      const std::uint32_t file = storage.pieces[t][p].file;
      const bool is_stored = numel_of(contents.tensors[t].pieces[p].region) != 0;
      if (is_stored && is_lost[file]) missing.pieces[t].emplace(p, storage.files[file]);
    }
  }
  return missing;
}

std::vector<std::string> DcpReader::data_files() const {
  std::vector<std::string> paths;
  for (const std::string& name : metadata_.storage.files)
    paths.push_back(join_path(directory_, name));
  return paths;
}

void DcpReader::check_files(const FindingSink& sink) const {
  const dcp::Storage& storage = metadata_.storage;
  // A file of a save with other shapes has its items at other places. Checking only the last item
  // of each file usually shows this, without reading data. A file of another save with the same
  // shapes is not noticed, because DCP stores no identity of a save.
  std::vector<const StorageInfo*> last_items(storage.files.size());
  const auto note = [&](const StorageInfo& info) {
    const StorageInfo*& last = last_items[info.file];
    if (last == nullptr || info.offset > last->offset) last = &info;
  };
  for (const StorageInfo& info : storage.values) note(info);
  std::ranges::for_each(storage.pieces.items(), note);
  ItemCheck check(path_, sink, {});
  for (std::uint32_t f = 0; f < last_items.size(); ++f) {
    try {
      open_file(f);
      if (last_items[f] != nullptr) open_item(*last_items[f]);
    } catch (const Error& error) {
      check.report_structure(error);
    }
  }
  if (is_whole()) megatron::check_torch_dist_files(fs_, path_, metadata_.contents, sink);
}

void DcpReader::verify_value(std::size_t value_index, ItemCheck& check) const {
  const std::string& name = metadata_.contents.values[value_index].name;
  const StorageInfo& info = metadata_.storage.values[value_index];
  try {
    const auto item = open_item(info);
    check.add_foreign_names(item->archive);
    if (const Error* refusal = refusal_of_tensor(value_index)) throw Error(*refusal);
    item->archive.as_value();
    check.check_members(name, item->archive.zip());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unsupported) {
      check.report_structure(error.at_tensor(name));
      return;
    }
    try {  // the bytes of a refused value are checked too
      const auto file = open_file_of(info);
      check.check_members(name, zip::ZipReader(*file, window_of(info)));
      check.report_refused_value(error.at_tensor(name));
    } catch (const Error& damage) {
      check.report_structure(damage.at_tensor(name));
    }
  }
}

/// Checks each value that was split into tensors and values (nested_tensors.h), once. Reports the
/// parts that Tessera refuses to read.
void DcpReader::verify_nested(const std::vector<bool>& is_readable, ItemCheck& check,
                              PartOfCheck& part) const {
  for (const dcp::NestedValue& nested : nested_.taken_apart) {
    if (!part.takes(nested.info.nbytes)) continue;
    if (is_readable[nested.info.file]) check.check(nested.name, [&] { return nested.item; });
  }
  if (!part.takes(0)) return;
  for (const auto& [index, content] : nested_.values) {
    if (const auto* refusal = std::get_if<Error>(&content)) check.report_refused_value(*refusal);
  }
}

void DcpReader::verify_part(const FindingSink& sink, const ProgressSink& progress,
                            int /*num_threads*/, PartOfCheck& part) const {
  if (part.takes(0)) {
    for (const Finding& finding : metadata_.contents.opening_findings) sink(finding);
  }
  ItemCheck check(path_, sink, progress);
  std::vector<bool> is_readable(metadata_.storage.files.size());
  for (std::uint32_t f = 0; f < is_readable.size(); ++f) {
    const bool is_taken = part.takes(0);
    try {
      open_file(f);
      is_readable[f] = true;
    } catch (const Error& error) {
      if (is_taken || tessera::detail::is_outside_failure(error))
        check.report_structure(error);  // once for the file, not for each item in it
    }
  }
  const CheckpointContents& contents = metadata_.contents;
  const dcp::Storage& storage = metadata_.storage;
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    if (nested_.values.contains(v) || !part.takes(storage.values[v].nbytes)) continue;
    if (!is_readable[storage.values[v].file]) continue;
    verify_value(v, check);
  }
  for (const auto& [v, info] : more_refused_items_) {
    if (!part.takes(info.nbytes) || !is_readable[info.file]) continue;
    try {
      const auto file = open_file_of(info);
      check.check_members(contents.values[v].name, zip::ZipReader(*file, window_of(info)));
    } catch (const Error& error) {
      check.report_structure(error.at_tensor(contents.values[v].name));
    }
  }
  verify_nested(is_readable, check, part);
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    if (nested_.tensors.contains(t)) continue;
    const TensorEntry& tensor = contents.tensors[t];
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const StorageInfo& info = storage.pieces[t][p];
      if (!part.takes(info.nbytes) || !is_readable[info.file]) continue;
      check.check(tensor.meta.fqn, [&] {
        auto chunk = open_chunk(tensor, std::get<Box>(tensor.pieces[p].region), info);
        chunk->item->archive.stored_range(chunk->record);  // throws if the range cannot be read
        return std::move(chunk->item);
      });
    }
  }
  if (is_whole()) {
    megatron::verify_torch_dist_files(fs_, path_, contents, sink, progress, part);
  }
  check.add_foreign_names(metadata_.foreign_names);
  check.report_sums(part);
}

}  // namespace

std::unique_ptr<CheckpointReader> open_dcp(const FileSystem& fs, std::string path) {
  return std::make_unique<DcpReader>(fs, std::move(path), std::vector<std::string>());
}

std::unique_ptr<CheckpointReader> open_dcp_with_classes(const FileSystem& fs, std::string path,
                                                        std::vector<std::string> as_dict) {
  return std::make_unique<DcpReader>(fs, std::move(path), std::move(as_dict));
}

std::unique_ptr<CheckpointReader> open_dcp_values(
    const FileSystem& fs, std::string path, std::vector<std::string> as_dict,
    const std::function<bool(std::string_view)>& keeps) {
  return std::make_unique<DcpReader>(fs, std::move(path), std::move(as_dict), keeps);
}

}  // namespace tessera::formats
