#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "base/utf8.h"
#include "formats/safetensors/header.h"
#include "formats/safetensors/metadata_keys.h"
#include "formats/safetensors/values_file.h"
#include "formats/whole_tensors.h"
#include "formats/writers.h"
#include "tessera/base/digest.h"
#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kModelName = "model.safetensors";
constexpr std::uint64_t kBlockNbytes = std::uint64_t{8} << 20;

std::string shard_name(std::size_t shard, std::size_t num_shards) {
  if (num_shards == 1) return std::string(kModelName);
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, num_shards);
  return name;
}

/// Says why safetensors cannot hold a tensor, in a word or two; nothing where it can.
std::optional<std::string> reason_against(const TensorMeta& meta) {
  if (!detail::safetensors_dtype(meta.dtype)) return std::string(dtype_name(meta.dtype));
  if (meta.dtype == DType::float4_e2m1fn_x2 && meta.shape.empty()) return "0-d float4";
  if (meta.fqn == "__metadata__") return "name of the header's own";
  if (!tessera::detail::is_valid_utf8(meta.fqn)) return "name that is no UTF-8";
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
                        "dtypes and names that safetensors has", found);
}

/// Returns the digest of the values that a single file names; nothing where there is no such file.
std::optional<std::string> values_digest_at(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::regular) return std::nullopt;
  try {
    for (auto& [key, text] : detail::read_header(*fs.open(path)).metadata) {
      if (key == detail::kValuesDigestKey) return std::move(text);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::io) throw;
    // What is no safetensors file names nothing.
  }
  return std::nullopt;
}

/// Whether the values at `path` have that digest.
bool has_values_digest(const FileSystem& fs, const std::string& path, const std::string& digest) {
  return fs.kind_of(path) == FileKind::regular &&
         fs.open(path)->nbytes() <= detail::kMaxValuesNbytes &&
         detail::values_digest(read_file(fs, path, detail::kMaxValuesNbytes)) == digest;
}

/// Puts back the values that the tensors at `destination` name, where a writer died after it had
/// replaced them and before it replaced the tensors. Requires: no other writer is at work there.
void put_back_replaced_values(FileSystem& fs, const std::string& destination) {
  const std::string path = destination + std::string(detail::kValuesSuffix);
  const std::string staged = StagedDestination::staging_path_of(path);
  if (fs.kind_of(path) != FileKind::regular || fs.kind_of(staged) != FileKind::regular) return;
  const auto digest = values_digest_at(fs, destination);
  if (!digest || has_values_digest(fs, path, *digest)) return;
  if (has_values_digest(fs, staged, *digest)) fs.exchange(staged, path);
}

/// Writes whole tensors at places that are known from the start.
class SafetensorsWriter final : public CheckpointWriter {
 public:
  SafetensorsWriter(FileSystem& fs, std::string destination, CheckpointContents contents,
                    const std::vector<Value>& values, const WorkOptions& work,
                    const SafetensorsWriteOptions& options)
      : fs_(fs), overwrite_(work.overwrite), contents_(std::move(contents)) {
    TESSERA_CHECK(values.size() == contents_.values.size());
    require_whole_tensors(contents_, destination, "safetensors");
    refuse_what_safetensors_lacks(contents_, destination);
    if (values.empty()) {
      structure_text_ = detail::format_values_file(contents_, values, JsonStyle::compact);
    }
    if (!values.empty() || structure_text_.size() > detail::kMaxStructureNbytes) {
      structure_text_.clear();
      values_text_ = detail::format_values_file(contents_, values, JsonStyle::indented);
    }
    if (values_text_.size() > detail::kMaxValuesNbytes) {
      throw Error::expected(
          ErrorKind::unsupported, {.path = destination}, "values",
          "at most " + std::to_string(detail::kMaxValuesNbytes) + " bytes of JSON",
          std::to_string(values_text_.size()) + " bytes");
    }

    const std::vector<std::vector<std::size_t>> shards = assign_shards(options.max_shard_nbytes);
    const DestinationKind kind = destination_kind(Format::safetensors, destination);
    is_single_file_ = kind == DestinationKind::file;
    if (is_single_file_ && shards.size() > 1) {
      throw Error::expected(
          ErrorKind::invalid_argument, {.path = destination}, "shard size",
          "tensors of at most " + std::to_string(*options.max_shard_nbytes) + " bytes in one file",
          std::to_string(total_nbytes()) + " bytes", "name a directory to write several files");
    }
    contents_.world_size = static_cast<int>(shards.size());
    places_.resize(contents_.tensors.size());
    for (std::size_t shard = 0; shard < shards.size(); ++shard) {
      for (const std::size_t i : shards[shard]) places_[i].shard = shard;
    }
    std::vector<std::string> headers;
    for (std::size_t shard = 0; shard < shards.size(); ++shard) {
      headers.push_back(lay_out(shard, shards[shard], destination));
    }

    work_.emplace(fs_, std::move(destination), kind, work);
    if (is_single_file_) {
      put_back_replaced_values(fs_, work_->destination());
      check_values_path();
    }
    if (is_single_file_ && !values_text_.empty()) {
      staged_values_.emplace(fs_, values_path(), DestinationKind::member_file,
                             has_published_values() ? OverwritePolicy::replace : overwrite_,
                             [&](const StagedDestination& staged) {
                               return detail::may_be_values_file(fs_, staged.staging_path())
                                          ? StagedDestination::LeftOver::remove
                                          : StagedDestination::LeftOver::foreign;
                             });
    }
    if (!is_single_file_) work_->require_no_files_but(file_names());
    for (std::size_t shard = 0; shard < shards_.size(); ++shard) start_file(shard, headers[shard]);
  }

  const CheckpointContents& contents() const override { return contents_; }
  std::vector<PieceId> write_order() const override { return write_order_; }

  std::int64_t block_numel(PieceId piece) const override {
    return static_cast<std::int64_t>(kBlockNbytes /
                                     itemsize(contents_.tensors.at(piece.tensor_index).meta.dtype));
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

  bool goes_on() const override { return work_->goes_on(); }
  bool keep_work() noexcept override { return work_->keep(); }

  void abandon() noexcept override {}  // nobody waits in write_block

  void commit() override {
    for (const auto& shard : shards_) TESSERA_CHECK(shard->unwritten_nbytes == 0);
    if (!is_single_file_) {
      if (!values_text_.empty()) write_text(values_path(), values_text_);
      if (shards_.size() > 1) {
        write_text(join_path(work_->staging_path(), index_name()), index_text());
      }
      work_->commit();
      return;
    }
    if (!staged_values_) {
      work_->commit();
      // Values of what was replaced would be ignored, but nothing would say so to a human reader.
      if (overwrite_ == OverwritePolicy::replace) remove_values();
      return;
    }
    const auto values_file = fs_.open_for_update(staged_values_->staging_path());
    values_file->write_at(0, std::as_bytes(std::span(values_text_)));
    finish_file(*values_file);
    // Whoever goes on must know the values for this work's own.
    if (Journal* journal = work_->journal()) journal->flush();
    // Values first: a new tensor file is never seen without its values. If what is replaced has
    // values too, then a crash between the two steps leaves tensors whose values have another
    // digest, which readers refuse.
    staged_values_->publish();
    work_->commit();
    staged_values_->commit();
  }

 private:
  struct Place {
    std::size_t shard = 0;
    std::uint64_t byte_begin = 0;  // within the file
  };
  struct Shard {
    std::string path;
    std::atomic<std::uint64_t> unwritten_nbytes = 0;
    std::mutex open_mutex;
    std::unique_ptr<WritableFile> file;  // from the first block on
  };

  Shard& shard_of(PieceId piece) { return *shards_[places_[piece.tensor_index].shard]; }

  /// Returns where the block lies in its file.
  ByteRange range_of(PieceId piece, std::int64_t begin, std::uint64_t nbytes) const {
    const TensorMeta& meta = contents_.tensors.at(piece.tensor_index).meta;
    const std::uint64_t begin_byte = static_cast<std::uint64_t>(begin) * itemsize(meta.dtype);
    TESSERA_CHECK(piece.piece_index == 0 && begin % block_numel(piece) == 0);
    TESSERA_CHECK(nbytes == std::min(kBlockNbytes, meta.nbytes() - begin_byte));
    const std::uint64_t first = places_[piece.tensor_index].byte_begin + begin_byte;
    return {first, first + nbytes};
  }

  /// Whoever has the last byte in its place finishes the file, while others go on with the next.
  void count_off(Shard& shard, std::uint64_t nbytes) {
    const std::uint64_t left_before = shard.unwritten_nbytes.fetch_sub(nbytes);
    TESSERA_CHECK(left_before >= nbytes);
    if (left_before == nbytes) finish_file(file_of(shard));
  }

  std::uint64_t total_nbytes() const {
    std::uint64_t nbytes = 0;
    for (const TensorEntry& tensor : contents_.tensors) nbytes += tensor.meta.nbytes();
    return nbytes;
  }

  /// Fills file after file in the order of names, as Hugging Face's own writers do.
  std::vector<std::vector<std::size_t>> assign_shards(
      std::optional<std::uint64_t> max_shard_nbytes) const {
    std::vector<std::vector<std::size_t>> shards(1);
    std::uint64_t shard_nbytes = 0;
    for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
      const std::uint64_t nbytes = contents_.tensors[i].meta.nbytes();
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

  /// Gives every tensor of the shard its place, and returns the file's header. Tensors lie in the
  /// order in which safetensors puts them: wide elements first, so that all are aligned.
  std::string lay_out(std::size_t shard_index, std::vector<std::size_t> tensors,
                      const std::string& destination) {
    std::ranges::sort(tensors, [&](std::size_t a, std::size_t b) {
      const auto width = [&](std::size_t i) { return itemsize(contents_.tensors[i].meta.dtype); };
      return std::tuple(width(b), a) < std::tuple(width(a), b);
    });
    std::vector<detail::HeaderTensor> header_tensors;
    std::uint64_t end = 0;
    for (const std::size_t i : tensors) {
      const TensorMeta& meta = contents_.tensors[i].meta;
      header_tensors.push_back({.meta = meta, .byte_range = {end, end + meta.nbytes()}});
      end += meta.nbytes();
    }
    std::string header = detail::format_header(header_tensors, metadata_of(shard_index));
    if (header.size() > detail::kMaxHeaderNbytes) {
      throw Error::expected(ErrorKind::invalid_argument, {.path = destination}, "header",
                            "at most " + std::to_string(detail::kMaxHeaderNbytes) + " bytes",
                            std::to_string(header.size()) + " bytes", "choose smaller shards");
    }

    for (std::size_t k = 0; k < tensors.size(); ++k) {
      const std::size_t i = tensors[k];
      places_[i].byte_begin = header.size() + header_tensors[k].byte_range.begin;
      if (header_tensors[k].byte_range.nbytes() > 0) write_order_.push_back({i, 0});
      contents_.tensors[i].pieces = {{.region = whole_box(contents_.tensors[i].meta.shape),
                                      .rank = static_cast<int>(shard_index)}};
    }
    auto shard = std::make_unique<Shard>();
    shard->unwritten_nbytes = end;
    shards_.push_back(std::move(shard));
    return header;
  }

  /// Returns `__metadata__` of a file: what the source carried, the aliases of its tensors, and in
  /// a file that has no index beside it the digest of the values, or what else there is to say.
  detail::Metadata metadata_of(std::size_t shard_index) const {
    std::map<std::string, std::string> metadata;
    Value::Dict texts;
    for (const auto& [key, text] : contents_.annotations) {
      if (key.starts_with("tessera.") || key == detail::kDcpShardingInfoKey ||
          key == detail::kDcpVersionKey) {
        continue;
      }
      // A key with a tensor's name as its text reads as a second name of that tensor.
      if (contents_.find_tensor(text) != nullptr) {
        texts.emplace_back(key, text);
      } else {
        metadata.emplace(key, text);
      }
    }
    if (!texts.empty()) metadata.emplace(detail::kTextsKey, value_to_json(std::move(texts)));
    metadata.emplace(detail::kFormatKey, "pt");
    Value::Dict aliases;
    for (const Alias& alias : contents_.aliases) {
      const TensorEntry* target = contents_.find_tensor(alias.target);
      TESSERA_CHECK(target != nullptr);
      const auto i = static_cast<std::size_t>(target - contents_.tensors.data());
      if (places_[i].shard == shard_index) aliases.emplace_back(alias.fqn, alias.target);
    }
    if (!aliases.empty()) metadata.emplace(detail::kAliasesKey, value_to_json(std::move(aliases)));
    if (contents_.world_size == 1) metadata.merge(values_metadata());
    return {metadata.begin(), metadata.end()};
  }

  /// Returns what the file, or the index, says of what is no tensor.
  std::map<std::string, std::string> values_metadata() const {
    std::map<std::string, std::string> metadata;
    if (!values_text_.empty()) {
      metadata.emplace(detail::kValuesDigestKey, detail::values_digest(values_text_));
    }
    if (!structure_text_.empty()) metadata.emplace(detail::kStructureKey, structure_text_);
    return metadata;
  }

  /// Returns the names of all that is written to a directory.
  std::set<std::string> file_names() const {
    std::set<std::string> names;
    for (std::size_t i = 0; i < shards_.size(); ++i) names.insert(shard_name(i, shards_.size()));
    if (shards_.size() > 1) names.insert(index_name());
    if (!values_text_.empty()) names.insert(last_component(values_path()));
    return names;
  }

  static std::string index_name() { return std::string(kModelName) + ".index.json"; }

  std::string index_text() const {
    Value::Dict weight_map;
    for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
      weight_map.emplace_back(contents_.tensors[i].meta.fqn,
                              shard_name(places_[i].shard, shards_.size()));
    }
    Value::Dict metadata{{"total_size", static_cast<std::int64_t>(total_nbytes())}};
    for (auto& [key, text] : values_metadata()) metadata.emplace_back(key, std::move(text));
    return value_to_json(Value::Dict{{"metadata", std::move(metadata)},
                                     {"weight_map", std::move(weight_map)}},
                         JsonStyle::indented) +
           "\n";
  }

  std::string values_path() const {
    return (is_single_file_ ? work_->destination()
                            : join_path(work_->staging_path(), std::string(kModelName))) +
           std::string(detail::kValuesSuffix);
  }

  /// Throws where what lies beside a single file, under the name of its values, may not be
  /// replaced.
  void check_values_path() const {
    const std::string path = values_path();
    if (!fs_.kind_of(path)) return;
    if (!detail::is_values_file(fs_, path)) {
      throw Error(ErrorKind::already_exists, {.path = path},
                  "values: this name is needed for what is no tensor, and something else has it "
                  "(remove or rename it)");
    }
    if (overwrite_ == OverwritePolicy::refuse && !has_published_values()) {
      throw Error(ErrorKind::already_exists, {.path = path},
                  "values: those of another checkpoint are here (remove them, or overwrite)");
    }
  }

  /// Removes values that no tensors name any more, and those that a dead writer had begun.
  void remove_values() {
    fs_.remove_all(values_path());
    const std::string staged = StagedDestination::staging_path_of(values_path());
    if (detail::is_values_file(fs_, staged)) fs_.remove_all(staged);
  }

  /// Whether the run that is gone on with died after its values had appeared.
  bool has_published_values() const {
    return work_->goes_on() && fs_.kind_of(values_path()) == FileKind::regular &&
           fs_.open(values_path())->nbytes() == values_text_.size() &&
           read_file(fs_, values_path(), values_text_.size()) == values_text_;
  }

  /// Writes the header and reserves the rest, so that a full disk shows before any work.
  void start_file(std::size_t shard_index, const std::string& header) {
    Shard& shard = *shards_[shard_index];
    shard.path = is_single_file_
                     ? work_->staging_path()
                     : join_path(work_->staging_path(), shard_name(shard_index, shards_.size()));
    const auto file = is_single_file_ ? fs_.open_for_update(shard.path)
                                      : begin_file(fs_, work_->journal(), shard.path);
    file->write_at(0, std::as_bytes(std::span(header)));
    if (shard.unwritten_nbytes == 0) {
      finish_file(*file);
    } else {
      file->resize(header.size() + shard.unwritten_nbytes);
      file->close();
    }
  }

  WritableFile& file_of(Shard& shard) {
    const std::scoped_lock lock(shard.open_mutex);
    if (!shard.file) shard.file = fs_.open_for_update(shard.path);
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
  CheckpointContents contents_;
  std::string values_text_;     // empty: no values file
  std::string structure_text_;  // empty: nothing to say, or said in the values file
  bool is_single_file_ = false;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<Place> places_;  // parallel to contents_.tensors
  std::vector<PieceId> write_order_;
  std::optional<StagedWork> work_;
  std::optional<StagedDestination> staged_values_;  // of a single file
};

}  // namespace

std::unique_ptr<CheckpointWriter> start_safetensors(FileSystem& fs, std::string destination,
                                                    CheckpointContents contents,
                                                    const std::vector<Value>& values,
                                                    const WorkOptions& work,
                                                    const SafetensorsWriteOptions& options) {
  return std::make_unique<SafetensorsWriter>(fs, std::move(destination), std::move(contents),
                                             values, work, options);
}

std::unique_ptr<CheckpointWriter> create_safetensors(FileSystem& fs, std::string destination,
                                                     CheckpointContents contents,
                                                     std::vector<Value> values,
                                                     OverwritePolicy overwrite,
                                                     const SafetensorsWriteOptions& options) {
  return start_safetensors(fs, std::move(destination), std::move(contents), values, {overwrite, {}},
                           options);
}

}  // namespace tessera::formats
