#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/cast.h"
#include "formats/dcp/dcp_parts.h"
#include "formats/drivers.h"
#include "formats/megatron/torch_dist_contents.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/staging/staged_work.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {
namespace {

using megatron::kCommonFile;
using megatron::kConfigFile;
using megatron::TorchDistContents;

/// The version of the format that Megatron knows.
constexpr std::string_view kConfig =
    R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
    R"("common_backend": "torch", "common_backend_version": 1})";

/// Returns the one number in `bytes`.
double decode_number(DType dtype, std::string_view bytes) {
  const auto as = [&](auto number) {
    TESSERA_CHECK(bytes.size() == sizeof number);
    std::memcpy(&number, bytes.data(), sizeof number);
    return static_cast<double>(number);
  };
  switch (dtype) {
    case DType::float32:
      return as(float{});
    case DType::float64:
      return as(double{});
    case DType::int64:
      return as(std::int64_t{});
    default:
      return as(std::int32_t{});
  }
}

bool has_file(const std::vector<ExtraFile>& files, std::string_view name) {
  return std::ranges::find(files, name, &ExtraFile::name) != files.end();
}

TorchDistContents sorted_for(const CheckpointContents& contents, const std::vector<Value>& values,
                             const std::string& destination, const CreateOptions& options) {
  const auto& files = options.extra_files;
  const auto common = std::ranges::find(files, kCommonFile, &ExtraFile::name);
  return megatron::sort_for_torch_dist(contents, values, destination,
                                       {.common = common == files.end() ? "" : common->path,
                                        .has_config = has_file(files, kConfigFile),
                                        .keep_names = options.keeps_names});
}

/// The DCP files, and the names of all that is written. `sorted.dcp` has been moved into `files`.
struct Prepared {
  TorchDistContents sorted;
  dcp::PreparedFiles files;
  bool writes_common = true;  // false: the source's file is copied
  bool writes_config = true;

  Prepared(const CheckpointContents& contents, const std::vector<Value>& values,
           const std::string& destination, const CreateOptions& options)
      : sorted(sorted_for(contents, values, destination, options)),
        files(dcp::prepare_files(destination, std::move(sorted.dcp), std::move(sorted.dcp_values))),
        writes_common(!has_file(options.extra_files, kCommonFile)),
        writes_config(!has_file(options.extra_files, kConfigFile)) {
    if (writes_common) sorted.common.check();
    if (writes_common) files.names.insert(kCommonFile);
    if (writes_config) files.names.insert(kConfigFile);
  }
};

/// Writes the pieces of the source into the files of a DCP checkpoint, in which layers and experts
/// are stacked. Also writes `common.pt` and `metadata.json`, unless the source's are copied. One
/// piece can have several places. As thread-safe as CheckpointWriter.
class TorchDistWriter final : public CheckpointWriter {
 public:
  TorchDistWriter(FileSystem& fs, const std::string& destination, SharedContents contents,
                  Prepared prepared, const WorkOptions& work)
      : fs_(fs),
        contents_(std::move(contents)),
        sorted_(std::move(prepared.sorted)),
        writes_common_(prepared.writes_common),
        writes_config_(prepared.writes_config),
        work_(fs, destination, DestinationKind::directory, work) {
    work_.set_file_names(prepared.files.names);
    dcp_ = prepared.files.start(fs, work_.staging_path(), work_.journal());
    find_places();
  }

  const CheckpointContents& contents() const override { return contents_; }
  std::span<const PieceId> write_order() const override { return order_; }

  std::int64_t block_numel(PieceId piece) const override {
    if (is_of_common(piece)) return std::max<std::int64_t>(1, meta_of(piece).numel());
    std::int64_t numel = 0;  // a multiple of what each place has, as sizes are powers of two
    for (const PieceId place : places_of(piece)) {
      numel = std::max(numel, dcp_->block_numel(place));
    }
    return numel;
  }

  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    if (is_of_common(piece)) {
      const std::lock_guard lock(mutex_);
      std::string& kept = kept_[piece.tensor_index];
      kept = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
      if (sorted_.steps.contains(piece.tensor_index)) {
        sorted_.common.set_step(meta_of(piece).fqn, decode_number(meta_of(piece).dtype, kept));
      }
      return;
    }
    std::vector<std::byte> widened;
    for (const PieceId place : places_of(piece)) {
      std::span<const std::byte> content = bytes;
      if (const DType from = meta_of(piece).dtype; dtype_of(place) != from) {
        widened.resize(bytes.size() / itemsize(from) * itemsize(dtype_of(place)));
        cast_elements(from, bytes, dtype_of(place), widened);
        content = widened;
      }
      for_each_block(place, begin, content, [&](std::int64_t at, auto block) {
        if (!is_there(place, at)) dcp_->write_block(place, at, block);
      });
    }
  }

  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte> room) override {
    if (is_of_common(piece)) return false;
    bool is_resumed = true;
    std::vector<std::byte> widened;
    for (const PieceId place : places_of(piece)) {
      std::span<std::byte> content = room;
      if (const DType from = meta_of(piece).dtype; dtype_of(place) != from) {
        widened.resize(room.size() / itemsize(from) * itemsize(dtype_of(place)));
        content = widened;
      }
      for_each_block(place, begin, content, [&](std::int64_t at, auto block) {
        if (!dcp_->resume_block(place, at, block)) {
          is_resumed = false;
          return;
        }
        const std::lock_guard lock(mutex_);
        resumed_.emplace(place.tensor_index, place.piece_index, at);
      });
    }
    return is_resumed;
  }

  bool is_resumed() const override { return work_.is_resumed(); }
  bool keep_work() noexcept override { return work_.keep(); }
  void abandon() noexcept override { dcp_->abandon(); }

  void commit() override {
    // The config first: a later run takes a `common.pt` with a config beside it for Tessera's.
    if (writes_config_) write(kConfigFile, kConfig);
    if (writes_common_) write(kCommonFile, sorted_.common.pickled(kept_));
    dcp_->commit();
    work_.commit();
  }

 private:
  const TensorMeta& meta_of(PieceId piece) const {
    return contents_->tensors[piece.tensor_index].meta;
  }
  DType dtype_of(PieceId place) const {
    return dcp_->contents().tensors[place.tensor_index].meta.dtype;
  }
  /// Calls `use` with the begin and the bytes of each block of the DCP files. `content`: elements
  /// of `place` from `begin` on.
  template <class Bytes, class Use>
  void for_each_block(PieceId place, std::int64_t begin, std::span<Bytes> content,
                      const Use& use) const {
    const std::size_t size = itemsize(dtype_of(place));
    const std::size_t nbytes = static_cast<std::size_t>(dcp_->block_numel(place)) * size;
    for (std::size_t at = 0; at < content.size(); at += nbytes) {
      use(begin + static_cast<std::int64_t>(at / size),
          content.subspan(at, std::min(nbytes, content.size() - at)));
    }
  }
  bool is_of_common(PieceId piece) const { return sorted_.of_common.contains(piece.tensor_index); }
  const std::vector<PieceId>& places_of(PieceId piece) const {
    return places_.at({piece.tensor_index, piece.piece_index});
  }
  /// Whether an interrupted run wrote the block at `begin` of `place`.
  bool is_there(PieceId place, std::int64_t begin) {
    const std::lock_guard lock(mutex_);
    return resumed_.contains({place.tensor_index, place.piece_index, begin});
  }

  /// Finds the pieces of the DCP files for each piece of the source, and the order of writing.
  void find_places() {
    for (const std::size_t t : sorted_.of_common) {
      const auto& pieces = contents_->tensors[t].pieces;
      const auto whole = std::ranges::find_if(
          pieces, [](const Piece& piece) { return numel_of(piece.region) != 0; });
      if (whole == pieces.end()) continue;
      order_.push_back({t, static_cast<std::size_t>(whole - pieces.begin())});
    }
    for (const PieceId place : dcp_->write_order()) {
      const TensorEntry& tensor = dcp_->contents().tensors[place.tensor_index];
      const Box& box = std::get<Box>(tensor.pieces[place.piece_index].region);
      const auto& sources = sorted_.sources.at(tensor.meta.fqn);
      const auto num_stacked = static_cast<std::ptrdiff_t>(sources.begin()->first.size());
      const std::size_t t = sources.at({box.offsets.begin(), box.offsets.begin() + num_stacked});
      const Region region = Box{{box.offsets.begin() + num_stacked, box.offsets.end()},
                                {box.sizes.begin() + num_stacked, box.sizes.end()}};
      const auto& pieces = contents_->tensors[t].pieces;
      const auto found = std::ranges::find(pieces, region, &Piece::region);
      TESSERA_CHECK(found != pieces.end());
      const PieceId piece{t, static_cast<std::size_t>(found - pieces.begin())};
      auto& places = places_[{piece.tensor_index, piece.piece_index}];
      if (places.empty()) order_.push_back(piece);
      places.push_back(place);
    }
  }

  void write(const char* name, std::string_view content) {
    const auto file =
        create_anew(fs_, work_.journal(), join_path(work_.staging_path(), std::string(name)));
    file->write_at(0, std::as_bytes(std::span(content)));
    file->sync();
    file->close();
  }

  FileSystem& fs_;
  const SharedContents contents_;
  TorchDistContents sorted_;
  const bool writes_common_;
  const bool writes_config_;
  StagedWork work_;  // outlives the writer of the DCP files
  std::unique_ptr<CheckpointWriter> dcp_;
  std::vector<PieceId> order_;
  std::map<std::pair<std::size_t, std::size_t>, std::vector<PieceId>> places_;  // by source piece
  std::mutex mutex_;                         // guards the members below
  std::map<std::size_t, std::string> kept_;  // the elements of the tensors of `common.pt`
  std::set<std::tuple<std::size_t, std::size_t, std::int64_t>> resumed_;
};

class MegatronFormatWriter final : public FormatWriter {
 public:
  Format format() const override { return megatron_driver().format(); }

  std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                          SharedContents contents, std::vector<Value> values,
                                          const CreateOptions& options) const override {
    Prepared prepared(contents, values, destination, options);
    return std::make_unique<TorchDistWriter>(fs, destination, std::move(contents),
                                             std::move(prepared), work_options(options));
  }
  void check_staging(FileSystem& fs, const std::string& destination,
                     const CheckpointContents& contents, const std::vector<Value>& values,
                     const CreateOptions& options) const override {
    const Prepared prepared(contents, values, destination, options);
    StagedWork::check(fs, destination, DestinationKind::directory, work_options(options),
                      prepared.files.names);
  }
  void check_elements(const std::string& destination, const CheckpointContents& contents,
                      const std::vector<Value>& values, const CreateOptions& options,
                      const ReadElement& read) const override {
    TorchDistContents sorted = sorted_for(contents, values, destination, options);
    for (const std::size_t t : sorted.steps) {
      const auto [dtype, bytes] = read(t);
      sorted.common.set_step(contents.tensors[t].meta.fqn, decode_number(dtype, bytes));
    }
  }
  std::vector<Finding> notes(const std::string& destination, const CheckpointContents& contents,
                             const CreateOptions& options,
                             const std::function<std::vector<Value>()>& values,
                             const ReadElement& /*read*/) const override {
    const TorchDistContents sorted = sorted_for(contents, values(), destination, options);
    std::vector<Finding> notes;
    const auto add = [&](const char* rule, const auto& names, const char* expected,
                         const char* found, const char* reason) {
      if (names.empty()) return;
      const std::string more =
          names.size() > 1 ? " and " + std::to_string(names.size() - 1) + " more" : "";
      notes.push_back({.severity = Finding::Severity::note,
                       .rule = rule,
                       .where = {.path = destination, .fqn = *names.begin()},
                       .expected = expected,
                       .found = found + more + reason});
    };
    add("weights", sorted.widened,
        "a copy in fp32 in the state of the optimizer, as Megatron has it", "none for this weight",
        " (made from the 16-bit weight)");
    add("param_groups", sorted.regrouped,
        "a group of matrices with weight decay and one of vectors and biases without, as Megatron "
        "makes them",
        "another group for this weight",
        " (in Megatron it gets the learning rate and weight decay of Megatron's group)");
    add("layers", sorted.stacked_unasked,
        "args.moe_layer_freq, which says whether Megatron gives layers with experts numbers",
        "none, so the layers are stacked",
        " (a model whose moe_layer_freq is a list does not find them: docs/from/megatron.md)");
    add("layers", sorted.numbered_unasked,
        "stacked layers, as content_metadata.non_homogeneous_layers in common.pt says",
        "the number of a layer in this name",
        " (the names are kept; a recipe with \"megatron\" and no rules stacks the layers)");
    if (megatron::has_common_object(contents) && !has_file(options.extra_files, kCommonFile)) {
      notes.push_back(
          {.severity = Finding::Severity::note,
           .rule = kCommonFile,
           .where = {.path = destination},
           .expected = "the state of the run in common.pt, where Megatron 0.16 reads it",
           .found = "it in the object 'common_state/shard_0_1' of a newer Megatron "
                    "(common.pt gets only defaults beside this object; a move to DCP "
                    "writes the object alone)"});
    }
    return notes;
  }
};

}  // namespace

const FormatWriter& megatron_writer() {
  static const MegatronFormatWriter writer;
  return writer;
}

}  // namespace tessera::formats
