#include "formats/torch_zip/torch_zip_reader.h"

#include <algorithm>
#include <compare>
#include <map>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include "formats/key_order.h"
#include "formats/numbered_names.h"
#include "formats/numbered_state.h"
#include "formats/open_files.h"
#include "formats/part_of_check.h"
#include "formats/piece_pool.h"
#include "formats/torch_zip.h"
#include "formats/torch_zip/other_records.h"
#include "formats/torch_zip/part_of_whole.h"
#include "formats/torch_zip/simplifications.h"
#include "formats/torch_zip/tar_members.h"
#include "formats/torch_zip/torch_archive.h"
#include "formats/torch_zip/torch_stream.h"
#include "formats/torch_zip/torch_tar.h"

namespace tessera::formats {
namespace {

using torch_zip::Leaf;
using torch_zip::Pieces;
using torch_zip::SavedObject;
using torch_zip::TensorRecord;
using torch_zip::TorchArchive;
using torch_zip::TorchStream;
using torch_zip::TorchTar;

constexpr std::size_t kNumFirstBytes = 512;

/// Throws if the file is a bare pickle, and says so.
void refuse_bare_pickle(const std::string& path, std::string_view first_bytes) {
  const bool is_pickle = first_bytes.size() > 1 && first_bytes[0] == '\x80' &&
                         first_bytes[1] <= 5 && first_bytes[1] >= 2;
  if (!is_pickle) return;
  throw Error::expected(ErrorKind::unsupported, {.path = path}, "file",
                        "an archive or a stream of torch.save", "a bare pickle",
                        "pickle.dump instead of torch.save?");
}

/// Opens the saved object in a file. The first bytes show which form the file has.
std::unique_ptr<SavedObject> open_saved(const ReadableFile& file,
                                        const std::vector<std::string>& as_dict) {
  std::string first_bytes(std::min<std::uint64_t>(kNumFirstBytes, file.nbytes()), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(first_bytes)));
  if (torch_zip::begins_as_stream(first_bytes)) {
    return std::make_unique<TorchStream>(file, as_dict);
  }
  if (torch_zip::begins_as_tar(first_bytes)) return std::make_unique<TorchTar>(file, as_dict);
  refuse_bare_pickle(file.path(), first_bytes);
  return std::make_unique<TorchArchive>(file, ByteRange{0, file.nbytes()}, as_dict);
}

/// Returns whether an entry is in a dict of an optimizer, such as `optimizer_states`, or is state
/// of a numbered parameter.
bool is_of_optimizer(const KeyPath& path) {
  const auto names_optimizer = [](const Key& key) {
    const auto* const name = std::get_if<std::string>(&key);
    return name != nullptr && name->starts_with("optim");
  };
  return is_numbered_state(path) || std::ranges::any_of(path, names_optimizer);
}

std::string name_of(const Leaf& leaf) {
  if (!leaf.path.empty()) return spell(leaf.path);
  return std::holds_alternative<TensorRecord>(leaf.content) ? "tensor" : "value";
}

/// Returns the Python index expression for a path: `['state'][0]['step']`.
std::string in_python(const KeyPath& path) {
  std::string text;
  for (const Key& key : path) {
    if (const auto* name = std::get_if<std::string>(&key)) {
      text += "['" + printable(*name) + "']";
    } else if (const auto* position = std::get_if<std::int64_t>(&key)) {
      text += "[" + std::to_string(*position) + "]";
    } else {
      text += "[" + std::get<NonStringKey>(key).json + "]";
    }
  }
  return text;
}

/// Returns an empty path if the path is a single text key, as CheckpointContents requires. Returns
/// other paths unchanged.
KeyPath key_path_of(KeyPath path) {
  if (path.size() == 1 && std::holds_alternative<std::string>(path.front())) path.clear();
  return path;
}

class TorchZipReader final : public torch_zip::TorchFileReader {
 public:
  /// `part_by_name`: the part that the file's name shows. Used if the content of the file does not
  /// show that it is a part.
  TorchZipReader(std::unique_ptr<ReadableFile> file, const std::vector<std::string>& as_dict,
                 Pieces pieces, std::optional<PartOfWhole> part_by_name = {})
      : path_(file->path()),
        file_(std::move(file)),
        saved_(open_saved(*file_, as_dict)),
        lists_pieces_(pieces == Pieces::listed) {
    torch_zip::Leaves flattened = saved_->flatten();
    contents_.opened_classes = std::move(flattened.opened_classes);
    contents_.part = torch_zip::find_part(saved_->root(), flattened.num_local_tensors, path_);
    if (!contents_.part) contents_.part = std::move(part_by_name);
    contents_.simplifications = std::move(flattened.simplifications);
    foreign_names_ = saved_->foreign_names();
    auto other_records = find_other_records();
    saved_->drop_pickle();
    add_leaves(named_leaves(std::move(flattened.leaves)));
    contents_.simplifications.shrink_to_fit();
    if (other_records) contents_.opening_findings.push_back(std::move(*other_records));
  }

  Format format() const override { return Format::torch_zip; }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }
  std::vector<std::vector<std::string>> dict_orders() const override {
    return {names_in_dict_order(contents_)};
  }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    TESSERA_CHECK(piece_index == 0);
    saved_->read_elements(record_of(tensor_index), contents_.tensors[tensor_index].meta.fqn, range,
                          out);
  }

  Value read_value(std::size_t value_index) const override {
    if (const Error* const refusal = refusal_of(value_index)) throw Error(*refusal);
    return values_[value_index];
  }

  const torch_zip::SharedPlace& place_of(std::size_t tensor_index) const override {
    return stored_[tensor_index].place;
  }
  std::optional<std::uint32_t> crc32_of(std::size_t tensor_index) const override {
    const TensorRecord record = record_of(tensor_index);
    const bool is_whole_storage =
        torch_zip::is_contiguous(record) && !record.conjugate && !record.negative &&
        contents_.tensors[tensor_index].meta.nbytes() == saved_->storages().nbytes(record.storage);
    return is_whole_storage ? saved_->storages().crc32(record.storage) : std::nullopt;
  }
  std::size_t order_of(std::size_t value_index) const override {
    return contents_.values[value_index].dict_order;
  }
  std::string saved_name() const override {
    const auto* const archive = dynamic_cast<const TorchArchive*>(saved_.get());
    return archive == nullptr ? std::string() : archive->prefix();
  }
  bool has_sole_object() const override { return has_sole_object_; }
  void drop_key_paths() override {
    for (TensorEntry& tensor : contents_.tensors) tensor.key_path = KeyPath();
    for (Alias& alias : contents_.aliases) alias.key_path = KeyPath();
    for (ValueEntry& value : contents_.values) value.key_path = KeyPath();
  }
  const Error* refusal_of(std::size_t value_index) const override {
    const auto refusal = refusals_.find(value_index);
    return refusal == refusals_.end() ? nullptr : &refusal->second;
  }

  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    TESSERA_CHECK(piece_index == 0);
    const TensorRecord record = record_of(tensor_index);
    const ByteRange stored = saved_->stored_range(record);
    PieceStorage storage{.file = path_.substr(path_.find_last_of('/') + 1),
                         .byte_range = std::nullopt,
                         .encoding = std::string(saved_->encoding()),
                         .stored_nbytes = stored.nbytes()};
    if (torch_zip::is_contiguous(record) && !stored.empty()) storage.byte_range = stored;
    return storage;
  }

  std::vector<std::string> data_files() const override { return {path_}; }
  std::vector<std::string> foreign_names() const override { return foreign_names_; }
  std::shared_ptr<torch_zip::StorageChecks> checks() const override { return saved_->checks(); }
  void continue_checks(std::shared_ptr<torch_zip::StorageChecks> checks) override {
    saved_->continue_checks(std::move(checks));
  }
  void check_rest(const RestOptions& options) const override { saved_->check_rest(options); }
  void check_files(const FindingSink&) const override {}  // one file, and it is open
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int /*num_threads*/,
                   PartOfCheck& part) const override {
    NamesOfStorages names;  // storage -> its first tensor
    for (std::size_t i = 0; i < stored_.size(); ++i) {
      names.emplace(stored_[i].storage, contents_.tensors[i].meta.fqn);
    }
    if (const auto* archive = dynamic_cast<const TorchArchive*>(saved_.get())) {
      verify_members(archive->zip(), names, sink, progress, part);
    } else {
      verify_bytes(names, sink, progress, part);
    }
    if (!part.takes(0)) return;
    note_refused_values(sink, part);
    for (const Finding& finding : contents_.opening_findings) sink(finding);
  }

 private:
  struct NamedLeaf {
    std::string name;
    Leaf leaf;
    std::size_t place;  // order in the pickle
  };
  /// Members of a TensorRecord that reading needs and `contents_` does not have. Small, because a
  /// checkpoint of many files has a million tensors.
  struct Stored {
    explicit Stored(TensorRecord record)
        : storage(record.storage),
          storage_offset(record.storage_offset),
          place(std::move(record.place)),
          strides(torch_zip::is_contiguous(record)
                      ? nullptr
                      : std::make_unique<const Shape>(std::move(record.strides))),
          conjugate(record.conjugate),
          negative(record.negative) {}

    std::size_t storage;
    std::int64_t storage_offset;
    torch_zip::SharedPlace place;
    std::unique_ptr<const Shape> strides;  // null: contiguous
    bool conjugate;
    bool negative;
  };
  using NamesOfStorages = std::map<std::size_t, std::string_view>;
  /// A place that is ordered by its members, not by its address. Null comes first.
  struct PlaceInOrder {
    torch_zip::SharedPlace place;

    friend bool operator==(const PlaceInOrder& a, const PlaceInOrder& b) { return (a <=> b) == 0; }
    friend std::strong_ordering operator<=>(const PlaceInOrder& a, const PlaceInOrder& b) {
      if (a.place == nullptr || b.place == nullptr) {
        return (a.place != nullptr) <=> (b.place != nullptr);
      }
      return *a.place <=> *b.place;
    }
  };
  /// The elements of a tensor. Two names with equal Elements are names of the same tensor. The
  /// place distinguishes a rank's part of a sharded tensor from an ordinary tensor with the same
  /// elements (FSDP1's flat vector, and a parameter that fills it), and parts of wholes of other
  /// shapes.
  using Elements =
      std::tuple<std::size_t, std::int64_t, DType, Shape, Shape, bool, bool, PlaceInOrder>;
  using FirstLeaves = std::map<Elements, const NamedLeaf*>;

  TensorRecord record_of(std::size_t tensor_index) const {
    const TensorMeta& meta = contents_.tensors[tensor_index].meta;
    const Stored& stored = stored_[tensor_index];
    return {.dtype = meta.dtype,
            .shape = meta.shape,
            .strides = stored.strides ? *stored.strides : row_major_strides(meta.shape),
            .storage_offset = stored.storage_offset,
            .storage = stored.storage,
            .conjugate = stored.conjugate,
            .negative = stored.negative};
  }

  /// Returns the leaves sorted by name. Throws if two have the same name.
  std::vector<NamedLeaf> named_leaves(std::vector<Leaf> leaves) {
    std::vector<NamedLeaf> named;
    named.reserve(leaves.size());
    for (Leaf& leaf : leaves) {
      std::string name = name_of(leaf);
      if (leaf.path.empty()) {
        has_sole_object_ = true;
        note_sole_object(leaf, name);
      }
      named.push_back({std::move(name), std::move(leaf), named.size()});
    }
    std::ranges::sort(named, {}, &NamedLeaf::name);
    const auto twice = std::ranges::adjacent_find(named, {}, &NamedLeaf::name);
    if (twice == named.end()) return named;
    throw Error::expected(
        ErrorKind::unsupported, {.path = path_, .fqn = twice->name}, "flattened name", "one entry",
        "two, " + in_python(twice->leaf.path) + " and " + in_python(std::next(twice)->leaf.path),
        "save one of them under another key");
  }

  /// Returns the elements of a tensor; nothing for an empty tensor, which is never an alias.
  static std::optional<Elements> elements_of(const TensorRecord& record) {
    if (std::ranges::find(record.shape, 0) != record.shape.end()) return std::nullopt;
    return Elements{
        record.storage, record.storage_offset, record.dtype,    record.shape,
        record.strides, record.conjugate,      record.negative, PlaceInOrder{record.place}};
  }

  /// Returns, for each tensor, the leaf whose name it gets; its other names become aliases. This is
  /// the first in the pickle's order, because a model registers its input embedding before the
  /// output layer, and loaders of files without ties (transformers) look for the embedding. Names
  /// in an optimizer come last: its state may share the memory of a parameter.
  static FirstLeaves find_first_leaves(const std::vector<NamedLeaf>& leaves) {
    const auto rank_of = [](const NamedLeaf& named) {
      return std::pair(is_of_optimizer(named.leaf.path), named.place);
    };
    FirstLeaves first;
    for (const NamedLeaf& named : leaves) {
      const auto* const record = std::get_if<TensorRecord>(&named.leaf.content);
      const auto elements = record == nullptr ? std::nullopt : elements_of(*record);
      if (!elements) continue;
      const auto [found, is_new] = first.emplace(*elements, &named);
      if (!is_new && rank_of(named) < rank_of(*found->second)) found->second = &named;
    }
    return first;
  }

  void add_leaves(std::vector<NamedLeaf> leaves) {
    const FirstLeaves first_leaves = find_first_leaves(leaves);
    const auto num_tensors =
        static_cast<std::size_t>(std::ranges::count_if(leaves, [](const NamedLeaf& named) {
          return std::holds_alternative<TensorRecord>(named.leaf.content);
        }));
    const std::size_t num_values = leaves.size() - num_tensors;  // aliases are few
    contents_.values.reserve(num_values);
    values_.reserve(num_values);
    contents_.tensors.reserve(num_tensors);
    stored_.reserve(num_tensors);
    std::vector<TensorRecord> records;  // parallel to contents_.tensors
    records.reserve(num_tensors);
    for (NamedLeaf& named : leaves) {
      auto& [name, leaf, place] = named;
      KeyPath key_path = key_path_of(std::move(leaf.path));
      if (auto* record = std::get_if<TensorRecord>(&leaf.content)) {
        const auto elements = elements_of(*record);
        const NamedLeaf& first = elements ? *first_leaves.at(*elements) : named;
        add_tensor(named, std::move(key_path), std::move(*record), first, records);
        continue;
      }
      contents_.values.push_back(
          {name, std::move(key_path), static_cast<std::uint32_t>(place + 1)});
      if (auto* value = std::get_if<Value>(&leaf.content)) {
        values_.push_back(std::move(*value));
      } else {
        refusals_.emplace(values_.size(), std::get<Error>(leaf.content).at_tensor(name));
        values_.emplace_back();
      }
    }
    note_shared_memory(records);
    for (TensorRecord& record : records) stored_.emplace_back(std::move(record));
  }

  /// Reads the storages of the tensors in a stream or a tar archive. Notes that they have no CRCs.
  void verify_bytes(const NamesOfStorages& names, const FindingSink& sink,
                    const ProgressSink& progress, PartOfCheck& part) const {
    if (part.takes(0)) {
      sink({.severity = Finding::Severity::note,
            .rule = "checksum-absent",
            .where = {.path = path_},
            .expected = "checksums of the tensor bytes",
            .found = "none, this form of torch.save has no place for them"});
    }
    std::vector<std::byte> buffer(std::size_t{1} << 20);
    for (const auto& [storage, name] : names) {
      const std::uint64_t nbytes = saved_->storages().nbytes(storage);
      if (!part.takes(nbytes)) continue;
      for (std::uint64_t begin = 0; begin < nbytes;) {
        const std::uint64_t wanted = std::min<std::uint64_t>(buffer.size(), nbytes - begin);
        const std::span<std::byte> out = std::span(buffer).first(static_cast<std::size_t>(wanted));
        saved_->storages().read_at(storage, begin, out);
        begin += wanted;
        progress(wanted);
      }
    }
  }

  static void verify_members(const zip::ZipReader& zip, const NamesOfStorages& names,
                             const FindingSink& sink, const ProgressSink& progress,
                             PartOfCheck& part) {
    const std::string& path = zip.path();
    const std::vector<zip::Member>& members = zip.members();
    CountedNote absent{.kind = CountedNote::Kind::absent_crcs, .path = path};
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (!part.takes(members[i].stored_nbytes)) continue;
      ++absent.num_members;
      const auto name = names.find(i);
      ErrorWhere where{.path = path, .fqn = std::string(name == names.end() ? "" : name->second)};
      try {
        where.byte_range = zip.data_range(i);
        const std::uint32_t crc = zip.compute_crc(i, progress);
        if (!members[i].has_crc()) {
          ++absent.num_without_crc;
        } else if (crc != members[i].crc32) {
          sink({.severity = Finding::Severity::error,
                .rule = "checksum",
                .where = where,
                .expected = "CRC-32 " + zip::crc_text(members[i].crc32) + " of '" +
                            std::string(members[i].name) + "'",
                .found = zip::crc_text(crc)});
        }
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::corruption && error.kind() != ErrorKind::unsupported) throw;
        sink({.severity = Finding::Severity::error,
              .rule = "structure",
              .where = where,
              .expected = "a whole member '" + std::string(members[i].name) + "'",
              .found = std::string(error.reason())});
      }
    }
    part.report(std::move(absent), sink);
  }

  /// Reports a note for each value that Tessera refuses to read, and one note for all classes and
  /// functions in the pickle that Tessera does not know.
  void note_refused_values(const FindingSink& sink, PartOfCheck& part) const {
    for (const auto& [index, refusal] : refusals_) {
      sink({.severity = Finding::Severity::note,
            .rule = "value",
            .where = refusal.where(),
            .expected = "a value of plain types",
            .found = std::string(refusal.reason())});
    }
    CountedNote foreign{.kind = CountedNote::Kind::foreign_names, .path = path_};
    for (const std::string& name : foreign_names_) foreign.add_name(name);
    part.report(std::move(foreign), sink);
  }

  std::optional<Finding> find_other_records() const {
    if (const auto* archive = dynamic_cast<const TorchArchive*>(saved_.get())) {
      return torch_zip::note_of_other_records(*archive);
    }
    const auto* tar = dynamic_cast<const TorchTar*>(saved_.get());
    return tar == nullptr ? std::nullopt : torch_zip::note_of_other_members(*tar, path_);
  }

  /// Adds a note that the file holds one tensor or value instead of a dict, and that a move puts it
  /// under the key `name`. Adds no note for a value that Tessera does not read, because the error
  /// about this value is enough.
  void note_sole_object(const Leaf& leaf, const std::string& name) {
    const auto* const value = std::get_if<Value>(&leaf.content);
    const bool is_tensor = std::holds_alternative<TensorRecord>(leaf.content);
    if (value == nullptr && !is_tensor) return;
    const std::string what =
        is_tensor ? "a tensor" : "a value of type " + std::string(type_name(*value));
    contents_.opening_findings.push_back(
        {.severity = Finding::Severity::note,
         .rule = "structure",
         .where = {.path = path_},
         .expected = "a dict, or a list that holds a tensor or a dict",
         .found = what + "; a move makes a dict of it, with the key '" + name + "'"});
  }

  /// Adds simplifications for tensors that share memory. Leaves out names of the same elements in
  /// the same shape, because these are aliases.
  void note_shared_memory(const std::vector<TensorRecord>& records) {
    std::vector<std::pair<std::string, const TensorRecord*>> tensors;
    for (std::size_t i = 0; i < records.size(); ++i) {
      tensors.emplace_back(contents_.tensors[i].meta.fqn, &records[i]);
    }
    torch_zip::note_shared_memory(*saved_, tensors, contents_.simplifications);
  }

  /// Adds a tensor, or an alias of `first` if that is another leaf.
  void add_tensor(const NamedLeaf& named, KeyPath key_path, TensorRecord record,
                  const NamedLeaf& first, std::vector<TensorRecord>& records) {
    const std::string& name = named.name;
    torch_zip::note_flags(record, name, contents_.simplifications);
    const auto dict_order = static_cast<std::uint32_t>(named.place + 1);
    TensorEntry entry;
    entry.meta = {.fqn = name, .dtype = record.dtype, .shape = record.shape};
    validate_tensor_meta(entry.meta, path_);
    if (&named != &first) {
      contents_.aliases.push_back({name, first.name, std::move(key_path), dict_order});
      return;
    }
    entry.key_path = std::move(key_path);
    entry.dict_order = dict_order;
    if (lists_pieces_) entry.pieces = pieces_pool_.share({{whole_box(record.shape), 0}});
    contents_.tensors.push_back(std::move(entry));
    records.push_back(std::move(record));
  }

  std::string path_;
  std::unique_ptr<ReadableFile> file_;
  std::unique_ptr<SavedObject> saved_;
  CheckpointContents contents_;
  PiecePool pieces_pool_;                  // while opening
  std::vector<Stored> stored_;             // parallel to contents_.tensors
  std::vector<Value> values_;              // parallel to contents_.values; None where refused
  std::map<std::size_t, Error> refusals_;  // key: index of the value
  std::vector<std::string> foreign_names_;
  bool has_sole_object_ = false;
  bool lists_pieces_;
};

}  // namespace

std::unique_ptr<torch_zip::TorchFileReader> torch_zip::read_torch_zip(
    std::unique_ptr<ReadableFile> file, const std::vector<std::string>& as_dict, Pieces pieces) {
  return std::make_unique<TorchZipReader>(std::move(file), as_dict, pieces);
}

std::unique_ptr<CheckpointReader> open_torch_zip(const FileSystem& fs, std::string path) {
  return open_torch_zip_with_classes(fs, std::move(path), {});
}

std::unique_ptr<CheckpointReader> open_torch_zip_with_classes(
    const FileSystem& fs, std::string path, const std::vector<std::string>& as_dict) {
  auto part = part_by_names_beside(fs, path);
  if (!part) part = torch_zip::part_by_optimizer_beside(fs, path);
  return std::make_unique<TorchZipReader>(open_kept(fs, path), as_dict, Pieces::listed,
                                          std::move(part));
}

}  // namespace tessera::formats
