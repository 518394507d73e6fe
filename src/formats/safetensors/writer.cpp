#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "base/digest.h"
#include "base/json.h"
#include "base/utf8.h"
#include "formats/drivers.h"
#include "formats/safetensors/header.h"
#include "formats/safetensors/metadata_keys.h"
#include "formats/safetensors/shard_names.h"
#include "formats/safetensors/values_file.h"
#include "formats/staging/file_states.h"
#include "formats/staging/staged_destination.h"
#include "formats/staging/staged_work.h"
#include "formats/whole_tensors.h"
#include "tessera/base/error.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {
namespace {

constexpr std::uint64_t kBlockNbytes = std::uint64_t{8} << 20;

/// The names of the files that are written, as SafetensorsWriteOptions::stem says.
class ShardNames {
 public:
  ShardNames() = default;
  explicit ShardNames(const CreateOptions& options) {
    if (!options.safetensors.stem.empty()) {
      stem_ = options.safetensors.stem;
      return;
    }
    const bool is_adapter = std::ranges::any_of(options.extra_files, [](const ExtraFile& file) {
      return file.name == "adapter_config.json";
    });
    if (is_adapter) stem_ = "adapter_model";
  }

  std::string model() const { return stem_ + ".safetensors"; }
  std::string index() const { return stem_ + std::string(detail::kIndexSuffix); }
  std::string shard(std::size_t shard, std::size_t num_shards) const {
    if (num_shards == 1) return model();
    char place[64];
    std::snprintf(place, sizeof place, "-%05zu-of-%05zu.safetensors", shard + 1, num_shards);
    return stem_ + place;
  }
  /// Returns all names of a checkpoint.
  std::set<std::string> all(std::size_t num_shards, bool has_values) const {
    std::set<std::string> names;
    for (std::size_t i = 0; i < num_shards; ++i) names.insert(shard(i, num_shards));
    if (num_shards > 1) names.insert(index());
    if (has_values) names.insert(detail::values_path_of(model()));
    return names;
  }

 private:
  std::string stem_ = "model";
};

/// Returns the tensors of each file. Fills one file after the other in the order of names, as
/// Hugging Face's own writers do.
std::vector<std::vector<std::size_t>> assign_shards(const CheckpointContents& contents,
                                                    std::optional<std::uint64_t> max_shard_nbytes) {
  std::vector<std::vector<std::size_t>> shards(1);
  std::uint64_t shard_nbytes = 0;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const std::uint64_t nbytes = contents.tensors[i].meta.nbytes();
    if (max_shard_nbytes && !shards.back().empty() && nbytes > 0 &&
        (shard_nbytes > *max_shard_nbytes || nbytes > *max_shard_nbytes - shard_nbytes)) {
      shards.emplace_back();
      shard_nbytes = 0;
    }
    shards.back().push_back(i);
    shard_nbytes += nbytes;
  }
  return shards;
}

/// Returns in a few words why safetensors cannot hold a tensor; nothing if it can.
std::optional<std::string> reason_against(const TensorMeta& meta) {
  if (!detail::safetensors_dtype(meta.dtype)) return std::string(dtype_name(meta.dtype));
  if (meta.dtype == DType::float4_e2m1fn_x2 && meta.shape.empty()) return "0-d float4";
  if (meta.fqn == "__metadata__") return "name that is reserved for the header";
  if (!tessera::detail::is_valid_utf8(meta.fqn)) return "name that is not UTF-8";
  return std::nullopt;
}

void refuse_what_safetensors_lacks(const CheckpointContents& contents, const std::string& path) {
  static constexpr std::size_t kMaxShown = 8;
  std::map<std::string, std::vector<std::string>> refused;
  for (const TensorEntry& tensor : contents.tensors) {
    if (auto reason = reason_against(tensor.meta)) {
      refused[*std::move(reason)].push_back(printable(tensor.meta.fqn, 80));
    }
  }
  if (refused.empty()) return;
  std::string found;
  for (const auto& [reason, names] : refused) {
    if (!found.empty()) found += "; ";
    found += reason + ": ";
    for (std::size_t i = 0; i < std::min(names.size(), kMaxShown); ++i) {
      found += (i > 0 ? ", " : "") + names[i];
    }
    if (names.size() > kMaxShown) {
      found += " and " + std::to_string(names.size() - kMaxShown) + " more";
    }
  }
  throw Error::expected(ErrorKind::unsupported, {.path = path}, "tensors",
                        "dtypes and names that safetensors can hold", found);
}

/// The texts for everything that is not a tensor.
struct OtherTexts {
  std::string values;     // empty: no values file
  std::string structure;  // empty: no structure, or it is in the values file
};

OtherTexts other_texts(const CheckpointContents& contents, const std::vector<Value>& values,
                       const std::string& destination) {
  TESSERA_CHECK(values.size() == contents.values.size());
  OtherTexts texts;
  if (values.empty()) {
    texts.structure = detail::format_values_file(contents, values, JsonStyle::compact);
  }
  if (!values.empty() || texts.structure.size() > detail::kMaxStructureNbytes) {
    texts.structure.clear();
    texts.values = detail::format_values_file(contents, values, JsonStyle::indented);
  }
  if (texts.values.size() > detail::kMaxValuesNbytes) {
    throw Error::expected(ErrorKind::unsupported, {.path = destination}, "values",
                          "at most " + std::to_string(detail::kMaxValuesNbytes) + " bytes of JSON",
                          std::to_string(texts.values.size()) + " bytes");
  }
  return texts;
}

bool has_text(const FileSystem& fs, const std::string& path, const std::string& text) {
  return fs.kind_of(path) == FileKind::regular && fs.open(path)->nbytes() == text.size() &&
         read_file(fs, path, text.size()) == text;
}

StagedDestination::LeftOver judge_staged_values(const FileSystem& fs,
                                                const StagedDestination& staged) {
  return detail::may_be_values_file(fs, staged.staging_path())
             ? StagedDestination::LeftOver::remove
             : StagedDestination::LeftOver::foreign;
}

/// Says whether a writer died between its last two steps: the values file is already at its final
/// path, but the tensor file is still at the staging path. In the middle of an exchange ([Note:
/// Exchange in steps]), they belong to the destination, which will be there again.
bool are_values_of_work(const FileSystem& fs, const std::string& destination) {
  return !fs.kind_of(destination) &&
         !StagedDestination::is_in_exchange(fs, destination, DestinationKind::file) &&
         detail::names_values(fs, StagedDestination::staging_path_of(destination),
                              detail::values_path_of(destination));
}

/// Throws if the destination, or a file at the path of its values file, cannot be replaced.
/// Returns whether there is a values file of unfinished work that is to be removed.
bool check_single_file(FileSystem& fs, const std::string& destination,
                       const std::string& values_text, const WorkOptions& work) {
  const bool is_resumed = StagedWork::check(fs, destination, DestinationKind::file, work);
  const std::string path = detail::values_path_of(destination);
  const bool has_left_values = !is_resumed && are_values_of_work(fs, destination);
  if (fs.kind_of(path)) {
    if (!detail::is_values_file(fs, path)) {
      throw Error(ErrorKind::already_exists, {.path = path},
                  "values: the values of the checkpoint need this name, but another file has it "
                  "(remove or rename it)");
    }
    const bool is_own = has_left_values || (is_resumed && has_text(fs, path, values_text));
    // In the middle of an exchange, the values belong to the old or the new checkpoint of the
    // destination. The writer finishes the exchange, and then says that the destination exists.
    const bool is_in_exchange =
        StagedDestination::is_in_exchange(fs, destination, DestinationKind::file);
    if (work.overwrite == OverwritePolicy::refuse && !is_own && !is_in_exchange) {
      throw Error(
          ErrorKind::already_exists, {.path = path},
          "values: this file has the values of another checkpoint (move it beside its tensors)");
    }
  }
  if (!values_text.empty()) {
    StagedDestination::check(
        fs, path, DestinationKind::member_file, OverwritePolicy::replace,
        [&](const StagedDestination& staged) { return judge_staged_values(fs, staged); });
  }
  return has_left_values;
}

/// The place of every byte in the files, computed before anything is written. The constructor
/// throws if safetensors cannot hold the contents.
class FileLayout {
 public:
  struct Place {
    std::size_t shard = 0;
    std::uint64_t byte_begin = 0;  // within the file
  };
  struct Shard {
    std::string header;
    std::uint64_t data_nbytes = 0;  // after the header
  };

  FileLayout(const std::string& destination, SharedContents contents,
             const std::vector<Value>& values, const SafetensorsWriteOptions& options,
             ShardNames names)
      : contents_(std::move(contents)), names_(std::move(names)) {
    require_whole_tensors(contents_, destination, "safetensors");
    refuse_what_safetensors_lacks(contents_, destination);
    texts_ = other_texts(contents_, values, destination);

    const std::vector<std::vector<std::size_t>> shards =
        assign_shards(contents_, options.max_shard_nbytes);
    if (is_single_file(destination) && shards.size() > 1) {
      throw Error::expected(
          ErrorKind::invalid_argument, {.path = destination}, "shard size",
          "tensors of at most " + std::to_string(*options.max_shard_nbytes) + " bytes in one file",
          std::to_string(total_nbytes()) + " bytes",
          "give the path of a directory to write several files");
    }
    const auto num_shards = static_cast<int>(shards.size());
    if (contents_->world_size != num_shards) contents_.edit().world_size = num_shards;
    places_.resize(contents_->tensors.size());
    write_order_.reserve(contents_->tensors.size());
    for (std::size_t shard = 0; shard < shards.size(); ++shard) {
      for (const std::size_t i : shards[shard]) places_[i].shard = shard;
    }
    for (std::size_t shard = 0; shard < shards.size(); ++shard) {
      lay_out(shard, shards[shard], destination);
    }
  }

  static bool is_single_file(const std::string& destination) {
    return safetensors_driver().destination_kind(destination) == DestinationKind::file;
  }

  const CheckpointContents& contents() const { return *contents_; }
  const ShardNames& names() const { return names_; }
  /// Returns the names of all files in a directory.
  std::set<std::string> all_names() const {
    return names_.all(shards_.size(), !texts_.values.empty());
  }
  const OtherTexts& texts() const { return texts_; }
  const std::vector<Shard>& shards() const { return shards_; }
  const Place& place_of(std::size_t tensor_index) const { return places_[tensor_index]; }
  /// Returns the tensors that have bytes, in the order of the files.
  const std::vector<CheckpointWriter::PieceId>& write_order() const { return write_order_; }

  std::string index_text() const {
    Value::Dict weight_map;
    for (std::size_t i = 0; i < contents_->tensors.size(); ++i) {
      weight_map.emplace_back(contents_->tensors[i].meta.fqn,
                              names_.shard(places_[i].shard, shards_.size()));
    }
    Value::Dict metadata{{"total_size", static_cast<std::int64_t>(total_nbytes())}};
    for (auto& [key, text] : values_metadata()) metadata.emplace_back(key, std::move(text));
    return document_to_json(Value::Dict{{"metadata", std::move(metadata)},
                                        {"weight_map", std::move(weight_map)}},
                            JsonStyle::indented) +
           "\n";
  }

 private:
  std::uint64_t total_nbytes() const {
    std::uint64_t nbytes = 0;
    for (const TensorEntry& tensor : contents_->tensors) nbytes += tensor.meta.nbytes();
    return nbytes;
  }

  /// Gives every tensor of the shard its place, and makes the file's header. Tensors are in the
  /// order that safetensors uses: wide elements first, so that all are aligned.
  void lay_out(std::size_t shard_index, std::vector<std::size_t> tensors,
               const std::string& destination) {
    std::ranges::sort(tensors, [&](std::size_t a, std::size_t b) {
      const auto width = [&](std::size_t i) { return itemsize(contents_->tensors[i].meta.dtype); };
      return std::tuple(width(b), a) < std::tuple(width(a), b);
    });
    std::vector<detail::PlacedTensor> placed;
    placed.reserve(tensors.size());
    std::uint64_t end = 0;
    for (const std::size_t i : tensors) {
      const TensorMeta& meta = contents_->tensors[i].meta;
      placed.push_back({.meta = &meta, .begin = end});
      end += meta.nbytes();
    }
    std::string header = detail::format_header(placed, metadata_of(shard_index));
    if (header.size() > detail::kMaxHeaderNbytes) {
      throw Error::expected(ErrorKind::invalid_argument, {.path = destination}, "header",
                            "at most " + std::to_string(detail::kMaxHeaderNbytes) + " bytes",
                            std::to_string(header.size()) + " bytes",
                            "write more files, each with fewer tensors");
    }

    for (std::size_t k = 0; k < tensors.size(); ++k) {
      const std::size_t i = tensors[k];
      places_[i].byte_begin = header.size() + placed[k].begin;
      if (contents_->tensors[i].meta.nbytes() > 0) write_order_.push_back({i, 0});
      SharedVector<Piece> whole{{.region = whole_box(contents_->tensors[i].meta.shape),
                                 .rank = static_cast<int>(shard_index)}};
      // Edit only pieces that change, so that the contents stay shared with the plan.
      if (contents_->tensors[i].pieces != whole) {
        contents_.edit().tensors[i].pieces = std::move(whole);
      }
    }
    shards_.push_back({.header = std::move(header), .data_nbytes = end});
  }

  /// Returns `__metadata__` of a file: the annotations, the aliases of its tensors, and, if there
  /// is no index, the digest of the values or the structure.
  detail::Metadata metadata_of(std::size_t shard_index) const {
    std::map<std::string, std::string> metadata;
    Value::Dict texts;
    for (const auto& [key, text] : contents_->annotations) {
      // Readers would misread two kinds of annotations: they take one whose text is a tensor's name
      // for an alias, and a reserved key has a meaning. So these annotations are stored together
      // under kTextsKey.
      if (contents_->find_tensor(text) != nullptr || detail::is_reserved_key(key)) {
        texts.emplace_back(key, text);
      } else {
        metadata.emplace(key, text);
      }
    }
    if (!texts.empty()) metadata.emplace(detail::kTextsKey, value_to_json(std::move(texts)));
    metadata.emplace(detail::kFormatKey, "pt");
    Value::Dict aliases;
    for (const Alias& alias : contents_->aliases) {
      const TensorEntry* target = contents_->find_tensor(alias.target);
      TESSERA_CHECK(target != nullptr);
      const auto i = static_cast<std::size_t>(target - contents_->tensors.data());
      if (places_[i].shard == shard_index) aliases.emplace_back(alias.fqn, alias.target);
    }
    if (!aliases.empty()) metadata.emplace(detail::kAliasesKey, value_to_json(std::move(aliases)));
    if (contents_->world_size == 1) metadata.merge(values_metadata());
    return {metadata.begin(), metadata.end()};
  }

  /// Returns members of `__metadata__`, or of the index: the digest of the values file, or the
  /// structure text.
  std::map<std::string, std::string> values_metadata() const {
    std::map<std::string, std::string> metadata;
    if (!texts_.values.empty()) {
      metadata.emplace(detail::kValuesDigestKey, detail::values_digest(texts_.values));
    }
    if (!texts_.structure.empty()) metadata.emplace(detail::kStructureKey, texts_.structure);
    return metadata;
  }

  SharedContents contents_;
  ShardNames names_;
  OtherTexts texts_;
  std::vector<Shard> shards_;
  std::vector<Place> places_;  // parallel to contents_->tensors
  std::vector<CheckpointWriter::PieceId> write_order_;
};

/// Writes whole tensors. The place of every tensor in the files is known from the start.
class SafetensorsWriter final : public ShareWriter {
 public:
  SafetensorsWriter(FileSystem& fs, std::string destination, SharedContents contents,
                    const std::vector<Value>& values, const WorkOptions& work,
                    const SafetensorsWriteOptions& options, ShardNames names)
      : fs_(fs),
        overwrite_(work.overwrite),
        layout_(destination, std::move(contents), values, options, std::move(names)),
        is_single_file_(FileLayout::is_single_file(destination)) {
    for (const FileLayout::Shard& shard : layout_.shards()) {
      shards_.push_back(std::make_unique<Shard>());
      shards_.back()->data_nbytes = shard.data_nbytes;
      shards_.back()->unwritten_nbytes = shard.data_nbytes;
    }
    const bool is_share = work.share && work.share->step == ShareOptions::Step::write;
    // This check must come before left-over files are removed. A share does not check the values
    // file: the process that finishes the work writes it.
    const bool has_left_values = is_single_file_ && !is_share &&
                                 check_single_file(fs_, destination, layout_.texts().values, work);
    work_.emplace(fs_, std::move(destination),
                  is_single_file_ ? DestinationKind::file : DestinationKind::directory, work);
    for (std::size_t shard = 0; shard < shards_.size(); ++shard) {
      shards_[shard]->path =
          is_single_file_
              ? work_->staging_path()
              : join_path(work_->staging_path(), layout_.names().shard(shard, shards_.size()));
      shards_[shard]->header = &layout_.shards()[shard].header;
    }
    if (is_share) return;  // a share creates a file when it writes a block into it
    if (has_left_values) fs_.remove_all(values_path());
    if (is_single_file_) detail::put_back_replaced_values(fs_, work_->destination());
    if (is_single_file_ && !layout_.texts().values.empty()) stage_values();
    if (is_single_file_) replaced_values_ = file_states_at(fs_, values_path());
    if (!is_single_file_) work_->set_file_names(layout_.all_names());
    for (const auto& shard : shards_) start_file(*shard);
  }

  const CheckpointContents& contents() const override { return layout_.contents(); }
  std::span<const PieceId> write_order() const override { return layout_.write_order(); }

  std::int64_t block_numel(PieceId piece) const override {
    return static_cast<std::int64_t>(
        kBlockNbytes / itemsize(contents().tensors.at(piece.tensor_index).meta.dtype));
  }

  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    const ByteRange range = range_of(piece, begin, bytes.size());
    Shard& shard = shard_of(piece);
    file_of(shard).write_at(range.begin, bytes);
    if (Journal* journal = work_->journal()) {
      journal->note({piece, begin}, {.range = range, .checksum = xxh3_64(bytes)});
    }
    count_off(shard, bytes.size());
  }

  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override {
    Shard& shard = shard_of(piece);
    const auto checksum = read_plain_block(work_->journal(), {piece, begin}, shard.path,
                                           range_of(piece, begin, room.size()), room);
    if (!checksum || *checksum != xxh3_64(room)) return false;
    count_off(shard, room.size());
    return true;
  }

  Unit unit() const override { return Unit::block; }
  std::size_t file_of(PieceId piece) const override {
    return layout_.place_of(piece.tensor_index).shard;
  }
  void adopt_block(PieceId piece, std::int64_t begin) override {
    const TensorMeta& meta = contents().tensors.at(piece.tensor_index).meta;
    const std::uint64_t begin_byte = static_cast<std::uint64_t>(begin) * itemsize(meta.dtype);
    const ByteRange range =
        range_of(piece, begin, std::min(kBlockNbytes, meta.nbytes() - begin_byte));
    Shard& shard = shard_of(piece);
    recorded_plain_block(work_->journal(), {piece, begin}, shard.path, range);
    count_off(shard, range.nbytes());
  }
  void commit_share() override {
    for (const auto& shard : shards_) {
      if (shard->file && shard->unwritten_nbytes > 0) finish_file(*shard->file);
    }
    work_->commit_share();
  }

  bool is_resumed() const override { return work_->is_resumed(); }
  bool keep_work() noexcept override { return work_->keep(); }

  void abandon() noexcept override {}  // no thread waits in write_block

  void commit() override {
    for (const auto& shard : shards_) TESSERA_CHECK(shard->unwritten_nbytes == 0);
    if (!is_single_file_) {
      if (!layout_.texts().values.empty()) write_text(values_path(), layout_.texts().values);
      if (shards_.size() > 1) {
        write_text(join_path(work_->staging_path(), layout_.names().index()), layout_.index_text());
      }
      work_->commit();
      return;
    }
    if (!staged_values_) {
      // The new checkpoint has no values. Readers would ignore an old values file, but people would
      // not know that, so it is removed.
      const bool removes_values = overwrite_ == OverwritePolicy::replace;
      if (removes_values) require_file_states(fs_, values_path(), replaced_values_);
      work_->commit(ReplacedSideFiles::keep);
      if (removes_values) detail::remove_values_beside(fs_, work_->destination());
      return;
    }
    const auto values_file = fs_.open_for_update(staged_values_->staging_path());
    values_file->write_at(0, std::as_bytes(std::span(layout_.texts().values)));
    finish_file(*values_file);
    // If this run dies after `publish`, the journal tells the next run whose values these are.
    if (Journal* journal = work_->journal()) journal->flush();
    // Values first: a new tensor file is never seen without its values. After a crash between the
    // two steps, readers find the replaced values at `<values>.partial`. See [Note: Replaced
    // values].
    staged_values_->publish();
    work_->commit(ReplacedSideFiles::keep);
    staged_values_->commit();
  }

 private:
  struct Shard {
    std::string path;
    const std::string* header = nullptr;
    std::uint64_t data_nbytes = 0;  // after the header
    std::atomic<std::uint64_t> unwritten_nbytes = 0;
    std::mutex open_mutex;
    std::unique_ptr<WritableFile> file;  // from the first block on
  };

  Shard& shard_of(PieceId piece) { return *shards_[layout_.place_of(piece.tensor_index).shard]; }

  /// Returns the range of the block in its file.
  ByteRange range_of(PieceId piece, std::int64_t begin, std::uint64_t nbytes) const {
    const TensorMeta& meta = contents().tensors.at(piece.tensor_index).meta;
    const std::uint64_t begin_byte = static_cast<std::uint64_t>(begin) * itemsize(meta.dtype);
    TESSERA_CHECK(piece.piece_index == 0 && begin % block_numel(piece) == 0);
    TESSERA_CHECK(nbytes == std::min(kBlockNbytes, meta.nbytes() - begin_byte));
    const std::uint64_t first = layout_.place_of(piece.tensor_index).byte_begin + begin_byte;
    return {first, first + nbytes};
  }

  /// Counts bytes that have been written. The thread that writes a file's last bytes finishes the
  /// file, while other threads continue with the next file.
  void count_off(Shard& shard, std::uint64_t nbytes) {
    const std::uint64_t left_before = shard.unwritten_nbytes.fetch_sub(nbytes);
    TESSERA_CHECK(left_before >= nbytes);
    if (left_before == nbytes) finish_file(file_of(shard));
  }

  std::string values_path() const {
    return detail::values_path_of(is_single_file_
                                      ? work_->destination()
                                      : join_path(work_->staging_path(), layout_.names().model()));
  }

  void stage_values() {
    // The interrupted run may have died after publishing its values.
    const bool has_published =
        work_->is_resumed() && has_text(fs_, values_path(), layout_.texts().values);
    staged_values_.emplace(
        fs_, values_path(), DestinationKind::member_file,
        has_published ? OverwritePolicy::replace : overwrite_,
        [&](const StagedDestination& staged) { return judge_staged_values(fs_, staged); });
  }

  /// Writes the header and reserves the rest of the file, so that a full disk is noticed before any
  /// block is written. (A share starts each file only when it writes the file's first block.)
  void start_file(Shard& shard) {
    const auto file = is_single_file_ ? fs_.open_for_update(shard.path)
                                      : begin_file(fs_, work_->journal(), shard.path);
    file->write_at(0, std::as_bytes(std::span(*shard.header)));
    if (shard.data_nbytes == 0) {
      finish_file(*file);
    } else {
      file->resize(shard.header->size() + shard.data_nbytes);
      file->close();
    }
  }

  WritableFile& file_of(Shard& shard) {
    const std::scoped_lock lock(shard.open_mutex);
    if (!shard.file) {
      if (work_->is_share()) start_file(shard);
      shard.file = fs_.open_for_update(shard.path);
    }
    return *shard.file;
  }

  void write_text(const std::string& path, const std::string& text) {
    const auto file = create_anew(fs_, work_->journal(), path);
    file->write_at(0, std::as_bytes(std::span(text)));
    finish_file(*file);
  }

  static void finish_file(WritableFile& file) {
    file.sync();
    file.close();
  }

  FileSystem& fs_;
  OverwritePolicy overwrite_;
  const FileLayout layout_;
  const bool is_single_file_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::optional<StagedWork> work_;
  std::optional<StagedDestination> staged_values_;  // of a single file
  FileStates replaced_values_;                      // beside a single file, at the start
};

class SafetensorsFormatWriter final : public FormatWriter {
 public:
  Format format() const override { return Format::safetensors; }

  std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                          SharedContents contents, std::vector<Value> values,
                                          const CreateOptions& options) const override {
    return std::make_unique<SafetensorsWriter>(fs, destination, std::move(contents), values,
                                               work_options(options), options.safetensors,
                                               ShardNames(options));
  }
  std::unique_ptr<ShareWriter> start_share(FileSystem& fs, const std::string& destination,
                                           SharedContents contents, std::vector<Value> values,
                                           const CreateOptions& options,
                                           const ShareOptions& share) const override {
    return std::make_unique<SafetensorsWriter>(fs, destination, std::move(contents), values,
                                               work_options(options, share), options.safetensors,
                                               ShardNames(options));
  }
  void check_staging(FileSystem& fs, const std::string& destination,
                     const CheckpointContents& contents, const std::vector<Value>& values,
                     const CreateOptions& options) const override {
    const FileLayout layout(destination, SharedContents::of(contents), values, options.safetensors,
                            ShardNames(options));
    const WorkOptions work = work_options(options);
    if (FileLayout::is_single_file(destination)) {
      check_single_file(fs, destination, layout.texts().values, work);
    } else {
      StagedWork::check(fs, destination, DestinationKind::directory, work, layout.all_names());
    }
  }
  std::string describe_options(const CreateOptions& options) const override {
    const auto& max_nbytes = options.safetensors.max_shard_nbytes;
    return max_nbytes ? "files of " + std::to_string(*max_nbytes) + " bytes" : std::string();
  }
};

}  // namespace

const FormatWriter& safetensors_writer() {
  static const SafetensorsFormatWriter writer;
  return writer;
}

std::unique_ptr<CheckpointWriter> create_safetensors(FileSystem& fs, std::string destination,
                                                     CheckpointContents contents,
                                                     std::vector<Value> values,
                                                     OverwritePolicy overwrite,
                                                     const SafetensorsWriteOptions& options) {
  return std::make_unique<SafetensorsWriter>(fs, std::move(destination), std::move(contents),
                                             values, WorkOptions{overwrite, {}}, options,
                                             ShardNames());
}

}  // namespace tessera::formats
