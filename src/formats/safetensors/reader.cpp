#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/checked_math.h"
#include "base/json.h"
#include "base/list_of_lists.h"
#include "base/outside_failure.h"
#include "formats/file_names.h"
#include "formats/known_ranges.h"
#include "formats/numbered_names.h"
#include "formats/open_files.h"
#include "formats/part_of_check.h"
#include "formats/piece_pool.h"
#include "formats/safetensors/header.h"
#include "formats/safetensors/metadata_keys.h"
#include "formats/safetensors/shard_names.h"
#include "formats/safetensors/values_file.h"
#include "formats/signatures.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kFileSuffix = ".safetensors";

/// Whether a file has the name of a shard that one rank saved: [Note: Shards of ranks]. The first
/// number is the rank, counted from 1.
bool is_dcp_shard(std::string_view name) {
  return is_name_like(name, "shard-#-model-#-of-#.safetensors");
}

/// The files of a checkpoint, and the contents of its index.
struct FileSet {
  std::string directory;                                      // the names below are relative to it
  std::vector<std::string> names{};                           // sorted
  std::string index_path{};                                   // empty: no index
  std::unordered_map<std::string, std::string> weight_map{};  // of the index: tensor to file
  std::map<std::string, std::string> texts{};                 // of the index
  detail::ShardIndex::Rest rest{};                            // of the index
  std::string model_path{};  // the `<model>.safetensors` whose values file is sought; may be empty
  std::optional<std::string> values_digest{};  // of the index
  std::optional<std::string> structure{};      // of the index
  std::vector<std::string> unnamed{};          // files of a series that the index does not name
  bool lacks_index = false;                    // the names show that there was an index
  std::optional<PartOfWhole> part{};           // of a single file
  bool is_single_file = false;
};

/// Returns the directory of `path`. Returns an empty text if `path` is only a name, so that
/// messages show files as the caller named them.
std::string directory_before(const std::string& path) {
  return path.find('/') == std::string::npos ? "" : directory_of(path);
}

void read_index(const FileSystem& fs, const std::string& index_path, FileSet& set) {
  set.index_path = index_path;
  detail::ShardIndex index = detail::read_shard_index(fs, set.directory, index_path);
  set.weight_map = std::move(index.weight_map);
  set.texts = std::move(index.texts);
  set.rest = std::move(index.rest);
  set.names = std::move(index.names);
  if (const Value* metadata = index.whole.find("metadata")) {
    const auto text = [&](std::string_view key) -> std::optional<std::string> {
      const Value* found = metadata->find(key);
      if (found == nullptr || !found->is<std::string>()) return std::nullopt;
      return *found->get_if<std::string>();
    };
    set.values_digest = text(detail::kValuesDigestKey);
    set.structure = text(detail::kStructureKey);
  }
}

/// Returns the place that a file's name states, such as 2 of 3. Without an index, only these places
/// show that a file is missing. Returns nothing for DCP's shards, because their numbers may have
/// gaps: a rank writes only the files that it has tensors for.
std::optional<detail::PlaceInSeries> place_beside_index(std::string_view name) {
  if (is_dcp_shard(name)) return std::nullopt;
  return detail::place_in_series(name);
}

/// Returns all places that a file's name states: that of `place_beside_index`, and others such as
/// 1 of 3 in `model-1-of-3.safetensors`.
std::vector<detail::PlaceInSeries> places_in(std::string_view name) {
  std::vector<detail::PlaceInSeries> places;
  if (is_dcp_shard(name)) return places;
  for (const NumberedName& number : numbered_names(name)) {
    if (number.count) places.push_back({number.series, number.number, *number.count});
  }
  return places;
}

/// Returns the series of the names, such as `model-` for `model-00002-of-00003.safetensors`.
std::set<std::string> series_of(const std::vector<std::string>& names) {
  std::set<std::string> series;
  for (const std::string& name : names) {
    if (const auto place = place_beside_index(name)) series.insert(place->series);
  }
  return series;
}

/// Throws if `names` has the files of several models: accelerate writes `model_1.safetensors` for
/// the second model that was prepared together with the first.
void refuse_second_model(const std::string& directory, const std::vector<std::string>& names) {
  constexpr std::string_view kFirst = "model.safetensors";
  const auto second = std::ranges::find_if(
      names, [&](const std::string& name) { return is_name_like(name, "model_#.safetensors"); });
  if (second == names.end() || std::ranges::find(names, kFirst) == names.end()) return;
  throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, "models",
                        "the file of one model",
                        "'" + std::string(kFirst) + "' and '" + printable(*second) +
                            "', as accelerate writes several models",
                        "give the path of one file; merge joins several under prefixes");
}

/// Throws if a folder without an index has an adapter of PEFT and files of a model, which may also
/// be files of torch.save. `names`: all names in the folder.
void refuse_adapter_beside_model(const FileSystem& fs, const std::string& directory,
                                 const std::vector<std::string>& names) {
  const auto adapter = std::ranges::find(names, "adapter_model.safetensors");
  if (adapter == names.end()) return;
  std::vector<std::string> models = driver_of(Format("bin")).own_files(fs, directory, names, {});
  std::ranges::copy_if(names, std::back_inserter(models), [](const std::string& name) {
    return name == "model.safetensors" || place_beside_index(name).has_value();
  });
  const auto model = std::ranges::find_if(
      models, [](const std::string& name) { return !name.starts_with("adapter_model"); });
  if (model == models.end()) return;
  throw detail::refusal_of_adapter(directory, *model, *adapter);
}

FileSet files_in_directory(const FileSystem& fs, const std::string& path) {
  FileSet set{.directory = path};
  std::vector<std::string> indexes;
  const std::vector<std::string> all = fs.list_directory(path);
  for (const std::string& name : all) {
    if (name.ends_with(detail::kIndexSuffix)) indexes.push_back(name);
    if (name.ends_with(kFileSuffix)) set.names.push_back(name);
  }
  if (indexes.size() > 1) {
    const std::string usual = "model" + std::string(detail::kIndexSuffix);
    if (std::ranges::find(indexes, usual) == indexes.end()) {
      throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "index", "one index",
                            std::to_string(indexes.size()) + " indexes",
                            "give the path of one index");
    }
    indexes = {usual};
  }
  if (!indexes.empty()) {
    const std::vector<std::string> found = std::exchange(set.names, {});
    detail::require_in_checkpoint(fs, path, indexes[0]);
    const std::string index_path = join_path(path, indexes[0]);
    set.model_path = index_path.substr(0, index_path.size() - detail::kIndexSuffix.size());
    set.model_path += kFileSuffix;
    read_index(fs, index_path, set);
    detail::refuse_file_beside_index(path, found, indexes[0], set.names, detail::kShardNaming);
    std::ranges::copy_if(found, std::back_inserter(set.unnamed), [&](const std::string& name) {
      return place_beside_index(name) && std::ranges::find(set.names, name) == set.names.end();
    });
    return set;
  }
  if (set.names.empty()) {
    throw Error::expected(ErrorKind::not_found, {.path = path}, "safetensors",
                          "an index or .safetensors files", "neither of them");
  }
  refuse_second_model(path, set.names);
  refuse_adapter_beside_model(fs, path, all);
  for (const std::string& name : set.names) detail::require_in_checkpoint(fs, path, name);
  detail::require_all_shards(path, set.names, places_in);
  set.lacks_index = std::ranges::any_of(
      set.names, [](const std::string& name) { return place_beside_index(name).has_value(); });
  if (set.names.size() == 1) set.model_path = join_path(path, set.names[0]);
  return set;
}

/// Returns which part of a model a single file is, if its name, or the names of the files beside
/// it, show that the model has several files.
std::optional<PartOfWhole> part_by_name(const FileSystem& fs, const std::string& path,
                                        const std::string& directory, const std::string& name) {
  if (is_dcp_shard(name)) return std::nullopt;  // [Note: Shards of ranks]
  const auto place = place_beside_index(name);
  if (!place || place->count < 2) return part_by_names_beside(fs, path);
  return PartOfWhole{.unit = PartOfWhole::Unit::file,
                     .form = "file " + std::to_string(place->number) + " of a model",
                     .num_parts = place->count,
                     .series = join_path(directory, place->series),
                     .number = place->number};
}

/// [Note: Shards of ranks] A file that one rank has saved with PyTorch's HuggingFaceStorageWriter
/// can look like a complete checkpoint: the offsets of the first rank's shards are 0, and no file
/// says how large the tensors are or how many ranks there were. So a file with such a name counts
/// as a part (PartOfWhole), even if no other file is beside it. A file of another name is a part if
/// one of its shards has an offset.
std::optional<PartOfWhole> part_of_ranks(const FileSystem& fs, const std::string& path,
                                         bool has_offsets) {
  const std::string name = last_component(path);
  if (!is_dcp_shard(name) && !has_offsets) return std::nullopt;
  PartOfWhole part{.unit = PartOfWhole::Unit::file,
                   .form = "the shards that one rank saved with HuggingFaceStorageWriter"};
  if (!is_dcp_shard(name)) return part;
  const auto num_files = std::ranges::count_if(fs.list_directory(directory_of(path)), is_dcp_shard);
  if (num_files > 1) part.num_parts = static_cast<std::uint64_t>(num_files);
  return part;
}

FileSet find_files(const FileSystem& fs, const std::string& path) {
  const auto kind = fs.kind_of(path);
  if (kind == FileKind::directory) return files_in_directory(fs, path);
  const std::string name = last_component(path);
  FileSet set{.directory = directory_before(path)};
  if (kind && name.ends_with(detail::kIndexSuffix)) {
    set.model_path = path.substr(0, path.size() - detail::kIndexSuffix.size());
    set.model_path += kFileSuffix;
    read_index(fs, path, set);
  } else {
    set.names = {name};
    set.model_path = join_path(set.directory, name);
    set.part = part_by_name(fs, path, set.directory, name);
    set.is_single_file = true;
  }
  return set;
}

/// Returns the name that messages use for `DCP_SHARDING_INFO`.
std::string sharding_info_in_words() {
  return std::string(detail::kDcpShardingInfoKey) + " in the header's __metadata__";
}

/// Reads `DCP_SHARDING_INFO`: the offsets of each shard of this file in its tensor.
std::optional<std::unordered_map<std::string, Shape>> read_saved_offsets(
    const detail::Metadata& metadata, const std::string& path) {
  const auto info = std::ranges::find(metadata, detail::kDcpShardingInfoKey,
                                      [](const auto& entry) { return entry.first; });
  if (info == metadata.end()) return std::nullopt;
  const Value shards = parse_json(info->second, path, {.max_nbytes = detail::kMaxHeaderNbytes});
  const auto* dict = shards.get_if<Value::Dict>();
  const auto refuse = [&](const std::string& fqn, std::string_view expected,
                          std::string_view found) {
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = fqn},
                          sharding_info_in_words(), expected, found);
  };
  if (dict == nullptr) refuse("", "a JSON object", type_name(shards));
  std::unordered_map<std::string, Shape> saved_offsets;
  for (const auto& [key, item] : *dict) {
    const auto& fqn = *key.get_if<std::string>();
    const Value* offsets = item.find("saved_offsets");
    const auto* list = offsets == nullptr ? nullptr : offsets->get_if<Value::List>();
    if (list == nullptr) {
      refuse(fqn, "an array saved_offsets", offsets == nullptr ? "none" : type_name(*offsets));
    }
    Shape& shape = saved_offsets[fqn];
    for (const Value& offset : *list) {
      const auto* number = offset.get_if<std::int64_t>();
      if (number == nullptr || *number < 0) {
        refuse(fqn, "saved_offsets of at least 0", value_to_string(offset));
      }
      shape.push_back(*number);
    }
  }
  return saved_offsets;
}

bool has_offset(const std::unordered_map<std::string, Shape>& saved_offsets) {
  return std::ranges::any_of(saved_offsets, [](const auto& entry) {
    return std::ranges::any_of(entry.second, [](std::int64_t offset) { return offset > 0; });
  });
}

/// Returns the beginning that the names of all files of one rank share. DCP's file names contain
/// the rank: it is `shard-00002` in `shard-00002-model-00001-of-00003.safetensors`. For any other
/// name, returns the whole name.
std::string rank_prefix(const std::string& name) {
  const std::string base = last_component(name);
  if (!is_dcp_shard(base)) return name;
  return base.substr(0, base.find("-model-"));
}

class SafetensorsReader final : public DividedReader, public KnownRanges {
 public:
  SafetensorsReader(const FileSystem& fs, std::string path) : fs_(fs), path_(std::move(path)) {
    const FileSet set = find_files(fs_, path_);
    contents_.part = set.part;
    for (const std::string& name : set.names) {
      add_file(join_path(set.directory, name), name, set);
    }
    contents_.world_size = std::max(1, static_cast<int>(rank_of_prefix_.size()));
    finish_tensors();
    take_tied_names();
    for (const auto& [key, text] : set.texts) note_metadata(set.index_path, key, text);
    for (const auto& [tensor, file] : set.weight_map) {
      if (contents_.find_tensor(tensor) == nullptr && !foreign_tensors_.contains(tensor)) {
        throw Error::expected(ErrorKind::corruption, {.path = set.index_path, .fqn = tensor},
                              "weight_map", "the tensor in '" + printable(file) + "'",
                              "no tensor of this name there",
                              "is the index or the file from another save?");
      }
    }
    check_aliases();
    detail::ShardIndex::Rest rest = set.rest;
    if (!foreign_tensors_.empty()) rest.total_size.reset();  // it counts their bytes too
    for (Finding& finding :
         detail::notes_on_rest(rest, set.index_path, set.weight_map, contents_)) {
      tell(std::move(finding));
    }
    contents_.annotations.merge(texts_);
    note_differing_metadata();
    note_second_copies();
    if (set.index_path.empty() && !set.is_single_file) {
      note_missing_ranks(set);
      note_joined_files(set);
    }
    read_values(set);
    add_foreign_tensors();
    if (set.lacks_index) report_lost_index(set);
    for (const std::string& name : set.unnamed) {
      tell({.severity = Finding::Severity::note,
            .rule = "structure",
            .where = {.path = join_path(set.directory, name)},
            .expected = "an index that names this file, as the file's name suggests",
            .found = "an index that does not name it (not read)"});
    }
    named_tensors_.clear();
    rank_of_prefix_.clear();
  }

  Format format() const override { return Format::safetensors; }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const Location& location = locations_[tensor_index][piece_index];
    const TensorMeta& meta = contents_.tensors[tensor_index].meta;
    const std::uint64_t item_nbytes = itemsize(meta.dtype);
    TESSERA_CHECK(0 <= range.begin && range.begin <= range.end &&
                  range.end <= numel_of_piece(tensor_index, piece_index));
    TESSERA_CHECK(out.size() == static_cast<std::uint64_t>(range.numel()) * item_nbytes);
    const std::uint64_t begin =
        location.begin + static_cast<std::uint64_t>(range.begin) * item_nbytes;
    try {
      files_[location.file].opened->read_at(begin, out);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corruption) throw;
      const ErrorWhere where{.path = files_[location.file].path,
                             .fqn = meta.fqn,
                             .byte_range = ByteRange{begin, begin + out.size()}};
      throw Error::expected(ErrorKind::corruption, where, "file size",
                            "the size that it had when it was opened", "another size",
                            "does another program write it?");
    }
  }

  Value read_value(std::size_t value_index) const override {
    const auto refusal = foreign_tensors_.find(contents_.values.at(value_index).name);
    if (refusal != foreign_tensors_.end()) throw Error(refusal->second);
    return values_.at(value_index);
  }

  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    const Location& location = locations_[tensor_index][piece_index];
    const std::uint64_t nbytes =
        static_cast<std::uint64_t>(numel_of_piece(tensor_index, piece_index)) *
        itemsize(contents_.tensors[tensor_index].meta.dtype);
    return {.file = files_[location.file].name,
            .byte_range = ByteRange{location.begin, location.begin + nbytes},
            .encoding = "plain",
            .stored_nbytes = nbytes};
  }

  std::optional<KnownRange> known_range(std::size_t tensor_index,
                                        std::size_t piece_index) const override {
    return KnownRange{files_[locations_[tensor_index][piece_index].file].path,
                      piece_storage(tensor_index, piece_index).byte_range};
  }

  std::vector<std::string> data_files() const override {
    std::vector<std::string> paths;
    for (const auto& file : files_) paths.push_back(file.path);
    return paths;
  }

  void check_files(const FindingSink& sink) const override {
    for (const Finding& finding : findings_) sink(finding);
  }

  void verify_part(const FindingSink& sink, const ProgressSink& progress, int /*num_threads*/,
                   PartOfCheck& part) const override {
    if (part.takes(0)) {
      check_files(sink);
      sink({.severity = Finding::Severity::note,
            .rule = "checksum-absent",
            .where = {.path = path_},
            .expected = "checksums of the tensor bytes",
            .found = "none, the format has no place for them"});
    }
    std::vector<std::byte> buffer(std::size_t{4} << 20);
    for (std::size_t file = 0; file < files_.size(); ++file) {
      if (!part.takes(files_[file].data_range.nbytes())) continue;
      try {
        const ReadableFile& readable = *files_[file].opened;
        const ByteRange data_range = files_[file].data_range;
        for (std::uint64_t begin = data_range.begin; begin < data_range.end;) {
          const std::uint64_t nbytes =
              std::min<std::uint64_t>(buffer.size(), data_range.end - begin);
          readable.read_at(begin, std::span(buffer).first(static_cast<std::size_t>(nbytes)));
          begin += nbytes;
          progress(nbytes);
        }
      } catch (const Error& error) {
        // These errors say nothing about the checkpoint: the system failed, a signal arrived, or
        // the file is a stream whose bytes were not kept.
        if (tessera::detail::is_outside_failure(error) || error.kind() == ErrorKind::unsupported) {
          throw;
        }
        sink({.severity = Finding::Severity::error,
              .rule = "structure",
              .where = error.where(),
              .expected = "all bytes that the header describes",
              .found = std::string(error.reason())});
      }
    }
  }

 private:
  struct File {
    std::string path;
    std::string name;  // relative to the checkpoint
    ByteRange data_range;
    // The file whose header was read. A read may open it again, which fails if it was replaced.
    std::unique_ptr<const ReadableFile> opened;
  };
  /// Where the bytes of a piece begin.
  struct Location {
    std::uint64_t begin;
    std::size_t file;
  };
  std::int64_t numel_of_piece(std::size_t tensor_index, std::size_t piece_index) const {
    return numel_of(contents_.tensors[tensor_index].pieces[piece_index].region);
  }

  /// A tensor while files are still being added.
  struct NamedTensor {
    TensorEntry entry;
    std::vector<Location> locations;
    bool is_sharded = false;  // every piece so far states its offsets
  };

  void add_file(const std::string& path, const std::string& name, const FileSet& set) {
    auto file = open_kept(fs_, path);
    detail::Header header = detail::read_header(*file);
    note_unknown_fields(header, path);
    auto saved_offsets = read_saved_offsets(header.metadata, path);
    const bool is_of_dcp = saved_offsets.has_value();
    if (is_of_dcp) require_shards(*saved_offsets, header, path);
    if (is_of_dcp && set.is_single_file) {
      // The rest of each tensor is in files that are not read. So the part in this file counts as a
      // whole tensor.
      if (!contents_.part) contents_.part = part_of_ranks(fs_, path, has_offset(*saved_offsets));
      if (contents_.part) saved_offsets.reset();
    }
    const auto [rank, is_new_rank] =
        rank_of_prefix_.emplace(rank_prefix(name), static_cast<int>(rank_of_prefix_.size()));
    for (detail::HeaderTensor& tensor : header.tensors) {
      if (!set.weight_map.empty()) {
        const auto listed = set.weight_map.find(tensor.meta.fqn);
        if (listed == set.weight_map.end()) {
          note_unlisted(path, tensor.meta.fqn, "a tensor that the index does not name");
        } else if (listed->second != name) {
          note_unlisted(path, tensor.meta.fqn,
                        "a tensor that the index puts into '" + printable(listed->second) + "'");
          second_copies_.push_back("'" + printable(tensor.meta.fqn) + "' in " + printable(name));
          continue;
        }
      }
      if (!tensor.foreign_dtype.empty()) {
        note_foreign_tensor(path, tensor);
        continue;
      }
      add_piece(path, std::move(tensor), saved_offsets, rank->second);
    }
    for (auto& [key, text] : header.metadata) {
      if (is_of_dcp && key == detail::kDcpVersionKey) continue;
      note_metadata(path, key, std::move(text));
    }
    files_.push_back({path, name, header.data_range, std::move(file)});
  }

  /// Throws if `DCP_SHARDING_INFO` names a tensor that the file lacks.
  static void require_shards(const std::unordered_map<std::string, Shape>& saved_offsets,
                             const detail::Header& header, const std::string& path) {
    std::set<std::string_view> lost;
    for (const auto& [name, offsets] : saved_offsets) lost.insert(name);
    for (const detail::HeaderTensor& tensor : header.tensors) lost.erase(tensor.meta.fqn);
    if (lost.empty()) return;
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = std::string(*lost.begin())},
                          sharding_info_in_words(), "names of tensors in this file",
                          "a name that no tensor has", "did another program save it again?");
  }

  void add_piece(const std::string& path, detail::HeaderTensor tensor,
                 const std::optional<std::unordered_map<std::string, Shape>>& saved_offsets,
                 int rank) {
    const std::string fqn = tensor.meta.fqn;
    const ErrorWhere where{.path = path, .fqn = fqn};
    Box box = whole_box(tensor.meta.shape);
    if (saved_offsets) {
      const auto offsets = saved_offsets->find(fqn);
      if (offsets == saved_offsets->end() || offsets->second.size() != box.sizes.size()) {
        throw Error::expected(
            ErrorKind::corruption, where, sharding_info_in_words(),
            std::to_string(box.sizes.size()) + " saved_offsets",
            offsets == saved_offsets->end() ? "none" : std::to_string(offsets->second.size()));
      }
      box.offsets = offsets->second;
    }
    // The tensor ends at the end of its furthest shard.
    Shape reach;
    for (std::size_t d = 0; d < box.sizes.size(); ++d) {
      const auto end = checked_add(box.offsets[d], box.sizes[d]);
      if (!end) {
        throw Error::expected(
            ErrorKind::corruption, where, sharding_info_in_words(),
            "offset plus size of at most 2^63 - 1 in dimension " + std::to_string(d),
            std::to_string(box.offsets[d]) + " plus " + std::to_string(box.sizes[d]));
      }
      reach.push_back(*end);
    }

    auto [slot, is_new] = named_tensors_.emplace(fqn, NamedTensor{});
    NamedTensor& named = slot->second;
    if (is_new) {
      named.entry.meta = {.fqn = fqn, .dtype = tensor.meta.dtype, .shape = reach};
      named.is_sharded = saved_offsets.has_value();
    } else {
      if (!named.is_sharded || !saved_offsets) {
        throw Error::expected(
            ErrorKind::corruption, where, "names", "each tensor in one file",
            "this tensor also in '" + printable(files_[named.locations[0].file].name) + "'",
            "are these files of different checkpoints, or variants of one such as fp16? "
            "To read one of them, give the file itself");
      }
      Shape& shape = named.entry.meta.shape;
      if (named.entry.meta.dtype != tensor.meta.dtype || shape.size() != reach.size()) {
        throw Error::expected(
            ErrorKind::corruption, where, "shards",
            std::string(dtype_name(named.entry.meta.dtype)) + " of " +
                std::to_string(shape.size()) + " dimensions as in '" +
                printable(files_[named.locations[0].file].name) + "'",
            std::string(dtype_name(tensor.meta.dtype)) + " of " + std::to_string(reach.size()),
            "are these files of different checkpoints?");
      }
      for (std::size_t d = 0; d < shape.size(); ++d) shape[d] = std::max(shape[d], reach[d]);
    }
    validate_tensor_meta(named.entry.meta, path);
    named.entry.pieces.push_back({.region = std::move(box), .rank = rank});
    if (is_new) named.entry.pieces = pieces_pool_.share(std::move(named.entry.pieces));
    named.locations.push_back({tensor.byte_range.begin, files_.size()});
  }

  void note_foreign_tensor(const std::string& path, const detail::HeaderTensor& tensor) {
    const std::string& fqn = tensor.meta.fqn;
    foreign_tensors_.try_emplace(
        fqn,
        Error::expected(
            ErrorKind::unsupported, {.path = path, .fqn = fqn, .byte_range = tensor.byte_range},
            "dtype", "a dtype that torch has",
            "a tensor of " + tensor.foreign_dtype + " " + shape_to_string(tensor.meta.shape)));
  }

  /// Lists tensors of dtypes that torch lacks as values that cannot be read, so that all others
  /// can.
  void add_foreign_tensors() {
    for (const auto& [fqn, refusal] : foreign_tensors_) {
      const auto place = std::ranges::lower_bound(contents_.values, fqn, {}, &ValueEntry::name);
      const bool is_taken = contents_.find_tensor(fqn) != nullptr ||
                            std::ranges::binary_search(contents_.aliases, fqn, {}, &Alias::fqn) ||
                            (place != contents_.values.end() && place->name == fqn);
      if (is_taken) {
        throw Error::expected(ErrorKind::corruption, refusal.where(), "names",
                              "a name that no other entry has", "the name of another entry");
      }
      values_.insert(values_.begin() + (place - contents_.values.begin()), Value());
      contents_.values.insert(place, ValueEntry{fqn});
    }
  }

  void note_unlisted(const std::string& path, const std::string& fqn, std::string found) {
    findings_.push_back({.severity = Finding::Severity::note,
                         .rule = "structure",
                         .where = {.path = path, .fqn = fqn},
                         .expected = "tensors as the index lists them",
                         .found = std::move(found)});
  }

  void note_metadata(const std::string& path, const std::string& key, std::string text) {
    if (key == detail::kAliasesKey) {
      // Names that begin with `$` are stored in the `$dict` form.
      const Value aliases =
          value_from_json(parse_json(text, path, {.max_nbytes = detail::kMaxHeaderNbytes}), path);
      const auto* dict = aliases.get_if<Value::Dict>();
      const auto refuse = [&](const std::string& fqn) {
        throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = fqn}, key,
                              "an object that maps names to tensors", "another kind of value");
      };
      if (dict == nullptr) refuse("");
      for (const auto& [alias, target] : *dict) {
        if (!alias.is<std::string>()) refuse("");
        const auto& fqn = *alias.get_if<std::string>();
        if (!target.is<std::string>()) refuse(fqn);
        contents_.aliases.push_back(
            {.fqn = fqn, .target = *target.get_if<std::string>(), .key_path = {}});
      }
    } else if (key == detail::kTextsKey) {
      const Value texts =
          value_from_json(parse_json(text, path, {.max_nbytes = detail::kMaxHeaderNbytes}), path);
      const auto* dict = texts.get_if<Value::Dict>();
      const bool is_sound = dict != nullptr && std::ranges::all_of(*dict, [](const auto& entry) {
                              return entry.first.template is<std::string>() &&
                                     entry.second.template is<std::string>();
                            });
      if (!is_sound) {
        throw Error::expected(ErrorKind::corruption, {.path = path}, key,
                              "an object that maps names to texts", "another kind of value");
      }
      for (const auto& [name, content] : *dict) {
        const auto [kept, is_new] =
            texts_.emplace(*name.get_if<std::string>(), *content.get_if<std::string>());
        if (!is_new && kept->second != *content.get_if<std::string>()) {
          differing_metadata_.insert(kept->first);
        }
      }
    } else if (key == detail::kValuesDigestKey) {
      values_digest_in_header_ = std::move(text);
    } else if (key == detail::kStructureKey) {
      structures_in_headers_.emplace_back(path, std::move(text));
    } else if (key != detail::kDcpShardingInfoKey) {
      const auto [kept, is_new] = contents_.annotations.try_emplace(key, text);
      if (!is_new && kept->second != text) differing_metadata_.insert(key);
    }
  }

  /// Adds a finding to the results of `verify`, and to the opening findings.
  void tell(Finding finding) {
    contents_.opening_findings.push_back(finding);
    findings_.push_back(std::move(finding));
  }

  /// Adds a note about fields of the header's entries that neither Python's safetensors nor Tessera
  /// reads.
  void note_unknown_fields(const detail::Header& header, const std::string& path) {
    if (header.unknown_fields.empty()) return;
    const std::vector<std::string> names(header.unknown_fields.begin(),
                                         header.unknown_fields.end());
    tell({.severity = Finding::Severity::note,
          .rule = "header",
          .where = {.path = path},
          .expected = "only dtype, shape and data_offsets for each tensor",
          .found = "also " + detail::some_of(names) + " (not read, and left out by a move)"});
  }

  void note_differing_metadata() {
    if (differing_metadata_.empty()) return;
    std::string keys;
    for (const std::string& key : differing_metadata_) {
      keys += (keys.empty() ? "'" : ", '") + printable(key) + "'";
    }
    tell({.severity = Finding::Severity::note,
          .rule = "__metadata__",
          .where = {.path = path_},
          .expected = "the same texts in all files",
          .found = "different texts for " + keys + " (the first file's texts are kept)"});
  }

  /// Adds a note if the ranks in the files' names have a gap (1, 2, 4): rank 3 had nothing to save,
  /// or its file is lost. A missing last rank is not noticed.
  void note_missing_ranks(const FileSet& set) {
    std::set<std::uint64_t> ranks;
    for (const std::string& name : set.names) {
      if (!is_dcp_shard(name)) continue;
      if (const auto shard = numbered_name(name)) ranks.insert(shard->number);
    }
    if (ranks.empty()) return;
    std::uint64_t missing = 1;
    while (ranks.contains(missing)) ++missing;
    if (missing > *ranks.rbegin()) return;
    tell({.severity = Finding::Severity::note,
          .rule = "structure",
          .where = {.path = path_},
          .expected = "shards of ranks 1 to " + std::to_string(*ranks.rbegin()),
          .found = "none of rank " + std::to_string(missing) +
                   " (did this rank have nothing to save, or is its file lost?)"});
  }

  /// Adds a note if files are read as one checkpoint although neither an index nor their names show
  /// that they belong together.
  void note_joined_files(const FileSet& set) {
    const auto is_of_series = [](const std::string& name) {
      return is_dcp_shard(name) || place_beside_index(name).has_value();
    };
    const bool are_shards = std::ranges::all_of(set.names, is_of_series);
    if (set.names.size() < 2 || (are_shards && series_of(set.names).size() < 2)) return;
    tell({.severity = Finding::Severity::note,
          .rule = "structure",
          .where = {.path = path_},
          .expected = "an index that names the files of one checkpoint",
          .found = "none (" + std::to_string(set.names.size()) +
                   " files are read as one checkpoint: " + detail::some_of(set.names) + ")"});
  }

  /// Adds a note about tensors in a file that are not read, because the index names another file
  /// for them.
  void note_second_copies() {
    if (second_copies_.empty()) return;
    const std::size_t num_copies = second_copies_.size();
    contents_.opening_findings.push_back(
        {.severity = Finding::Severity::note,
         .rule = "structure",
         .where = {.path = path_},
         .expected = "each tensor in one file",
         .found = std::to_string(num_copies) +
                  (num_copies == 1 ? " second copy: " : " second copies, such as ") +
                  second_copies_[0] + " (not read: the index names another file)"});
  }

  /// Reports that the index is missing: to `verify` as an error, on opening as a note. If a values
  /// file is beside the shards, it is an error on opening too: only the index has the digest of the
  /// values file, so without the index a move would lose the values.
  void report_lost_index(const FileSet& set) {
    findings_.push_back({.severity = Finding::Severity::error,
                         .rule = "structure",
                         .where = {.path = path_},
                         .expected = "an index next to the shards (it also names the values)",
                         .found = "none"});
    const std::size_t num_told = contents_.opening_findings.size();
    for (const std::string& series : series_of(set.names)) {
      const std::string model =
          join_path(set.directory, series.substr(0, series.find_last_not_of('-') + 1));
      const std::string values = detail::values_path_of(model + std::string(kFileSuffix));
      if (!detail::is_values_file(fs_, values)) continue;
      contents_.opening_findings.push_back(
          {.severity = Finding::Severity::error,
           .rule = "structure",
           .where = {.path = model + std::string(detail::kIndexSuffix)},
           .expected = "an index that names the values in " + last_component(values),
           .found = "none (an incomplete copy?)"});
    }
    if (contents_.opening_findings.size() > num_told) return;
    contents_.opening_findings.push_back(findings_.back());
    contents_.opening_findings.back().severity = Finding::Severity::note;
  }

  /// Adds a note about each values file that no tensor file and no index names. Either another
  /// program has saved the tensors again, or the values belong to other tensors.
  void note_unnamed_values(const FileSet& set) {
    std::set<std::string> paths;
    if (!set.model_path.empty()) paths.insert(detail::values_path_of(set.model_path));
    if (set.index_path.empty()) {
      for (const std::string& name : set.names) {
        paths.insert(detail::values_path_of(join_path(set.directory, name)));
      }
    }
    for (const std::string& path : paths) {
      if (!detail::is_values_file(fs_, path)) continue;
      tell({.severity = Finding::Severity::note,
            .rule = "values",
            .where = {.path = path},
            .expected = "a tensor file that refers to these values",
            .found = "none, so they are not read (did another program save the tensors again?)"});
    }
  }

  void finish_tensors() {
    // `named_tensors_` is sorted by name, in byte order.
    contents_.tensors.reserve(named_tensors_.size());
    locations_.reserve(named_tensors_.size(), named_tensors_.size());
    std::vector<std::string> repeated;
    for (auto& [fqn, named] : named_tensors_) {
      if (named.entry.pieces.size() > 1) {
        std::set<Box> boxes;
        for (const Piece& piece : named.entry.pieces) boxes.insert(std::get<Box>(piece.region));
        if (boxes.size() < named.entry.pieces.size()) repeated.push_back(fqn);
      }
      named.entry.pieces = pieces_pool_.share(std::move(named.entry.pieces));
      contents_.tensors.push_back(std::move(named.entry));
      locations_.add(named.locations);
    }
    if (repeated.empty()) return;
    tell({.severity = Finding::Severity::note,
          .rule = "structure",
          .where = {.path = path_},
          .expected = "each shard in one file",
          .found = "the same shard in several files: " + detail::some_of(repeated) +
                   " (one of them is read, and they are not compared)"});
  }

  /// Makes aliases of texts in the headers. safetensors.torch.save_model stores tied tensors under
  /// one of their names. For each other name, `__metadata__` has the stored name:
  /// `"lm_head.weight": "embed.weight"`. It writes no index, so texts of an index stay texts.
  void take_tied_names() {
    for (auto entry = contents_.annotations.begin(); entry != contents_.annotations.end();) {
      const auto& [key, text] = *entry;
      if (key != detail::kFormatKey && contents_.find_tensor(text) != nullptr &&
          contents_.find_tensor(key) == nullptr) {
        contents_.aliases.push_back({.fqn = key, .target = text, .key_path = {}});
        entry = contents_.annotations.erase(entry);
      } else {
        ++entry;
      }
    }
  }

  void check_aliases() {
    std::ranges::sort(contents_.aliases, {}, &Alias::fqn);
    const Alias* previous = nullptr;
    for (const Alias& alias : contents_.aliases) {
      const bool is_taken = contents_.find_tensor(alias.fqn) != nullptr ||
                            (previous != nullptr && previous->fqn == alias.fqn);
      if (is_taken || contents_.find_tensor(alias.target) == nullptr) {
        throw Error::expected(
            ErrorKind::corruption, {.path = path_, .fqn = alias.fqn}, detail::kAliasesKey,
            is_taken ? "a name that no other entry has" : "an alias of a tensor",
            is_taken ? "the name of another entry"
                     : "an alias of '" + printable(alias.target) + "', which is no tensor");
      }
      previous = &alias;
    }
  }

  void read_structure(const FileSet& set) {
    note_unnamed_values(set);
    if (set.structure) return apply_structure(*set.structure, set.index_path);
    for (const auto& [path, text] : structures_in_headers_) apply_structure(text, path);
  }

  void apply_structure(const std::string& text, const std::string& path) {
    detail::apply_values_file(text, path, contents_, values_);
    if (values_.empty()) return;
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = contents_.values[0].name},
                          detail::kStructureKey,
                          "no values in the header, because values have their own file",
                          "a value of this name");
  }

  void read_values(const FileSet& set) {
    // Another program may have written the index.
    const bool is_in_headers = !set.values_digest && !set.structure;
    const auto& digest = is_in_headers ? values_digest_in_header_ : set.values_digest;
    if (!digest) return read_structure(set);
    const std::string model_path = !is_in_headers          ? set.model_path
                                   : set.names.size() == 1 ? join_path(set.directory, set.names[0])
                                                           : "";
    if (model_path.empty() && !set.index_path.empty()) {
      tell({.severity = Finding::Severity::note,
            .rule = "values",
            .where = {.path = set.index_path},
            .expected = "an index that names the values",
            .found = "none, but a file that names its own values (not read)"});
      return read_structure(set);
    }
    if (model_path.empty()) {
      throw Error::expected(ErrorKind::unsupported, {.path = set.directory}, "directory",
                            "one file, or an index that names the values",
                            "several files, one of them with its own values file",
                            "give the path of one file");
    }
    const std::string path = detail::values_path_of(model_path);
    if (fs_.kind_of(path) == FileKind::regular) {
      detail::require_in_checkpoint(fs_, set.directory, last_component(path));
    }
    const auto text = detail::read_values_file(fs_, path, *digest);
    if (!text) {
      contents_.missing_files.push_back(path);
      findings_.push_back({.severity = Finding::Severity::error,
                           .rule = "structure",
                           .where = {.path = path},
                           .expected = "the values that belong to the tensors",
                           .found = "no such file (was it not copied with the tensors?)"});
      return;
    }
    detail::apply_values_file(*text, path, contents_, values_);
  }

  const FileSystem& fs_;
  std::string path_;
  std::vector<File> files_;
  CheckpointContents contents_;
  /// Parallel to contents_.tensors and their pieces.
  tessera::detail::ListOfLists<Location> locations_;
  std::vector<Value> values_;  // parallel to contents_.values
  /// Tensors of dtypes that torch lacks, by name, each with the error that says so. They are listed
  /// as values.
  std::map<std::string, Error, std::less<>> foreign_tensors_;
  std::vector<Finding> findings_;  // found while opening, reported by verify

  std::map<std::string, NamedTensor> named_tensors_;  // while opening
  PiecePool pieces_pool_;                             // while opening
  std::map<std::string, int> rank_of_prefix_;         // while opening
  std::set<std::string>
      differing_metadata_;                  // keys whose texts differ between files; while opening
  std::vector<std::string> second_copies_;  // described in words; while opening
  std::optional<std::string> values_digest_in_header_;
  std::vector<std::pair<std::string, std::string>> structures_in_headers_;  // file and text
  std::map<std::string, std::string> texts_;  // while opening: of kTextsKey, never aliases
};

}  // namespace

std::uint64_t safetensors_nbytes(const ReadableFile& file) {
  return detail::read_laid_out_nbytes(file);
}

namespace {

/// PyTorch writes the shards of the ranks into this folder. Beside the folder, it writes whole
/// files that it makes of the shards.
constexpr const char* kShardsFolder = "sharded";

/// Whether the directory has the folder with the shards of ranks.
bool has_shards_of_ranks(const FileSystem& fs, const std::string& directory) {
  const std::string folder = join_path(directory, kShardsFolder);
  if (fs.kind_of(directory) != FileKind::directory) return false;
  if (fs.kind_of(folder) != FileKind::directory) return false;
  return std::ranges::any_of(fs.list_directory(folder),
                             [](const std::string& name) { return name.ends_with(kFileSuffix); });
}

}  // namespace

std::unique_ptr<CheckpointReader> open_safetensors(const FileSystem& fs, std::string path) {
  try {
    return std::make_unique<SafetensorsReader>(fs, path);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corruption || !has_shards_of_ranks(fs, path)) throw;
    throw Error(error.kind(), error.where(),
                std::string(error.reason()) + " (did the consolidation fail? the shards are in " +
                    printable(join_path(path, kShardsFolder)) + ")",
                error.remedy());
  }
}

}  // namespace tessera::formats
