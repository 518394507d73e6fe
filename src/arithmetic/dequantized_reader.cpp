#include "arithmetic/dequantized_reader.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "arithmetic/comfyui_formats.h"
#include "arithmetic/overflow.h"
#include "arithmetic/quantized_weights.h"
#include "formats/derived_reader.h"
#include "formats/renamed_units.h"
#include "formats/simplified_values.h"
#include "recipe/tile_cache.h"
#include "reshard/config_quantization.h"
#include "tessera/base/error.h"

namespace tessera::arithmetic {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::TensorEntry;

/// How many numbers are decoded at a time.
constexpr std::int64_t kPartNumel = std::int64_t{1} << 18;

void replace_suffix(std::string& text, const QuantizedWeight& weight) {
  if (weight.codes_suffix.empty() || !text.ends_with(weight.codes_suffix)) return;
  text.resize(text.size() - weight.codes_suffix.size());
  text += weight.suffix;
}

/// Gives codes the name of the weight, also in the last key of their path.
void rename_codes(std::string& name, formats::SharedKeyPath& key_path,
                  const QuantizedWeight& weight) {
  replace_suffix(name, weight);
  if (key_path.empty()) return;
  if (auto* key = std::get_if<std::string>(&key_path.edit().back())) replace_suffix(*key, weight);
}

/// Returns the pieces of the tensor of numbers. If each code is one element of the tensor of codes,
/// these are the pieces of the codes. If codes are packed, it is one piece with the whole tensor.
std::vector<formats::Piece> pieces_of(const TensorEntry& codes, const QuantizedWeight& weight) {
  if (weight.matrix.form == CodeForm::elements) return codes.pieces;
  return {{whole_box(weight.shape), codes.pieces.empty() ? 0 : codes.pieces.front().rank}};
}

class DequantizedReader final : public formats::DerivedReader, public formats::SimplifiedValues {
 public:
  DequantizedReader(std::unique_ptr<CheckpointReader> source, QuantizedWeights found, DType to,
                    const NameSelection& only, reshard::OnOverflow on_overflow,
                    std::shared_ptr<RoundingLosses> losses)
      : DerivedReader(std::move(source)),
        weights_(std::move(found.weights)),
        to_(to),
        on_overflow_(on_overflow),
        losses_(std::move(losses)) {
    contents_ = base().contents();
    remove_settings();
    take_tensors(found.companions);
    take_aliases();
    take_units();
    note_disputed_zeros(only);
  }

  std::vector<std::vector<std::string>> dict_orders() const override {
    return base().dict_orders();
  }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;
  Value read_value(std::size_t value_index) const override {
    return base().read_value(value_index);
  }
  std::vector<formats::Simplification> simplifications_of_value(
      std::size_t value_index) const override {
    return formats::simplifications_of_value(base(), value_index);
  }
  formats::PieceStorage piece_storage(std::size_t tensor_index,
                                      std::size_t piece_index) const override {
    const Origin& origin = origins_[tensor_index];
    const auto& pieces = base().contents().tensors[origin.source].pieces;
    return base().piece_storage(origin.source, std::min(piece_index, pieces.size() - 1));
  }
  formats::MissingData find_missing_data() const override;

 private:
  /// Where a tensor comes from.
  struct Origin {
    std::size_t source = 0;             // index of the tensor, or of the weight's codes
    std::optional<std::size_t> weight;  // index in weights_; none: the tensor is not quantized
  };

  void remove_settings();
  void note(std::string expected, std::string found);
  void take_tensors(const std::set<std::size_t>& companions);
  void take_aliases();
  void take_units();
  void note_disputed_zeros(const NameSelection& only);
  [[noreturn]] void refuse_name(const std::string& name) const;
  /// The tensor that is read, and where to add what rounding changes; null: nowhere.
  struct Counted {
    const std::string& fqn;
    RoundingLosses* losses = nullptr;
  };

  std::vector<RoundingLosses::Part> parts_to_count(const std::string& fqn, const Region& region,
                                                   FlatRange range, int share = 0) const;
  void read_rows(const QuantizedWeight& weight, Counted counted, FlatRange range,
                 std::span<std::byte> out) const;
  void read_transposed(const QuantizedWeight& weight, Counted counted, FlatRange range, int share,
                       std::span<std::byte> out) const;
  void round(std::span<const float> numbers, std::span<const std::size_t> overflowed,
             Counted counted, std::span<std::byte> out) const;

  std::vector<QuantizedWeight> weights_;
  DType to_;
  reshard::OnOverflow on_overflow_;
  std::shared_ptr<RoundingLosses> losses_;
  std::vector<Origin> origins_;  // parallel to contents_.tensors
  mutable recipe::TileCache tiles_;
};

void DequantizedReader::note(std::string expected, std::string found) {
  contents_.opening_findings.push_back({.severity = formats::Finding::Severity::note,
                                        .rule = "dequantize",
                                        .where = {.path = path()},
                                        .expected = std::move(expected),
                                        .found = std::move(found)});
}

/// Removes what the texts beside the tensors (`__metadata__`) say about a quantization, because the
/// weights are numbers now.
void DequantizedReader::remove_settings() {
  std::string removed;
  const auto add = [&](const std::string& name) {
    removed += (removed.empty() ? "'" : ", '") + printable(name) + "'";
  };
  for (const std::string& name :
       {std::string("quantization_config"), std::string(kComfyUiMetadataKey)}) {
    if (contents_.annotations.erase(name) > 0) add(name);
  }
  const auto config = contents_.annotations.find("config");
  if (config != contents_.annotations.end()) {
    auto without = reshard::remove_quantization(config->second);
    if (without && !without->removed.empty()) {
      for (const std::string& member : without->removed) add("config." + member);
      config->second = std::move(without->text);
    }
  }
  if (removed.empty()) return;
  note("texts that describe numbers", "settings of the quantization (removed): " + removed);
}

void DequantizedReader::take_tensors(const std::set<std::size_t>& companions) {
  std::map<std::size_t, std::size_t> weight_of;  // key: index of the codes
  for (std::size_t w = 0; w < weights_.size(); ++w) weight_of.emplace(weights_[w].codes, w);
  std::map<std::string, std::pair<TensorEntry, Origin>> named;
  const auto& tensors = base().contents().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (companions.contains(i)) continue;
    TensorEntry entry = tensors[i];
    Origin origin{.source = i, .weight = {}};
    if (const auto found = weight_of.find(i); found != weight_of.end()) {
      const QuantizedWeight& weight = weights_[found->second];
      origin.weight = found->second;
      rename_codes(entry.meta.fqn, entry.key_path, weight);
      entry.pieces = pieces_of(entry, weight);
      entry.meta.dtype = to_;
      entry.meta.shape = weight.shape;
      validate_tensor_meta(entry.meta, path());
    }
    std::string name = entry.meta.fqn;
    if (!named.emplace(name, std::pair(std::move(entry), origin)).second) refuse_name(name);
  }
  contents_.tensors.clear();
  for (auto& [name, tensor] : named) {
    contents_.tensors.push_back(std::move(tensor.first));
    origins_.push_back(tensor.second);
  }
}

/// Gives tied codes the names of weights. Leaves out the aliases of companions.
void DequantizedReader::take_aliases() {
  std::map<std::string_view, std::size_t> tensor_of;  // key: the target's name in the source
  for (std::size_t t = 0; t < origins_.size(); ++t) {
    tensor_of.emplace(base().contents().tensors[origins_[t].source].meta.fqn, t);
  }
  std::erase_if(contents_.aliases,
                [&](const formats::Alias& alias) { return !tensor_of.contains(alias.target); });
  std::set<std::string> names;
  for (formats::Alias& alias : contents_.aliases) {
    const std::size_t tensor = tensor_of.at(alias.target);
    alias.target = contents_.tensors[tensor].meta.fqn;
    const auto& weight = origins_[tensor].weight;
    if (weight) rename_codes(alias.fqn, alias.key_path, weights_[*weight]);
    if (contents_.find_tensor(alias.fqn) != nullptr || !names.insert(alias.fqn).second) {
      refuse_name(alias.fqn);
    }
  }
  std::ranges::sort(contents_.aliases, {}, &formats::Alias::fqn);
}

/// Takes the flat units without codes: the dtype of the others would no longer be right.
void DequantizedReader::take_units() {
  std::set<std::string_view> codes;
  for (const QuantizedWeight& weight : weights_) {
    codes.insert(base().contents().tensors[weight.codes].meta.fqn);
  }
  const auto name = [&](const std::string& parameter) {
    return codes.contains(parameter) ? std::nullopt : std::optional(parameter);
  };
  formats::take_units(base(), name, contents_);
}

/// Adds a note on zero points that programs read differently.
void DequantizedReader::note_disputed_zeros(const NameSelection& only) {
  std::int64_t num_zeros = 0;
  std::size_t num_weights = 0;
  std::string first;
  for (std::size_t t = 0; t < origins_.size(); ++t) {
    const std::string& name = contents_.tensors[t].meta.fqn;
    if (!origins_[t].weight || !only.selects(name)) continue;
    const std::int64_t num_in_weight = weights_[*origins_[t].weight].num_disputed_zeros;
    if (num_in_weight == 0) continue;
    if (num_weights++ == 0) first = name;
    num_zeros += num_in_weight;
  }
  if (num_weights == 0) return;
  note("zero points of GPTQ that are stored as less than the largest integer",
       std::to_string(num_zeros) + " of the largest integer in " + std::to_string(num_weights) +
           (num_weights == 1 ? " weight" : " weights") + " ('" + printable(first) +
           "'), read as this integer plus 1, as AutoGPTQ does (GPTQModel reads 0)");
}

void DequantizedReader::refuse_name(const std::string& name) const {
  throw Error::expected(ErrorKind::mismatch, {.path = path(), .fqn = name}, "dequantize",
                        "one tensor of this name", "a dequantized weight and another tensor");
}

formats::MissingData DequantizedReader::find_missing_data() const {
  const formats::MissingData below = base().find_missing_data();
  formats::MissingData result;
  result.values = below.values;
  for (std::size_t t = 0; t < origins_.size(); ++t) {
    const auto lost = below.pieces.find(origins_[t].source);
    if (lost == below.pieces.end()) continue;
    for (const auto& [piece, file] : lost->second) {
      result.pieces[t].emplace(std::min(piece, contents_.tensors[t].pieces.size() - 1), file);
    }
  }
  return result;
}

void DequantizedReader::read_piece(std::size_t tensor_index, std::size_t piece_index,
                                   FlatRange range, std::span<std::byte> out) const {
  const Origin& origin = origins_[tensor_index];
  if (!origin.weight) return base().read_piece(origin.source, piece_index, range, out);
  const QuantizedWeight& weight = weights_[*origin.weight];
  const TensorMeta& meta = contents_.tensors[tensor_index].meta;
  const Region& region = contents_.tensors[tensor_index].pieces[piece_index].region;
  const auto size = static_cast<std::size_t>(itemsize(to_));
  if (weight.is_transposed) {
    return tiles_.read(
        tensor_index, piece_index, numel_of(weight.shape), size, range,
        [&](FlatRange tile, int share, std::span<std::byte> room) {
          const auto parts = parts_to_count(meta.fqn, region, tile, share);
          TESSERA_CHECK(parts.size() == 1);
          const bool is_new = parts.front().is_new;
          read_transposed(weight, {meta.fqn, is_new ? losses_.get() : nullptr}, tile, share, room);
        },
        out);
  }
  const CopyRuns runs(meta.shape, FlatRange{0, numel_of(meta.shape)}, region);
  for (const auto& [part, is_new] : parts_to_count(meta.fqn, region, range)) {
    const Counted counted{meta.fqn, is_new ? losses_.get() : nullptr};
    runs.for_each_in(part, [&](const CopyRuns::Run& run) {
      read_rows(weight, counted, {run.source_begin, run.source_begin + run.numel},
                out.subspan(static_cast<std::size_t>(run.destination_begin - range.begin) * size,
                            static_cast<std::size_t>(run.numel) * size));
    });
  }
}

/// Divides `range`, elements of a region of a tensor, into parts whose losses are to be counted and
/// parts that were counted already.
std::vector<RoundingLosses::Part> DequantizedReader::parts_to_count(const std::string& fqn,
                                                                    const Region& region,
                                                                    FlatRange range,
                                                                    int share) const {
  if (losses_ == nullptr) return {{range}};
  return losses_->take(fqn, region, range, share);
}

void DequantizedReader::round(std::span<const float> numbers,
                              std::span<const std::size_t> overflowed, Counted counted,
                              std::span<std::byte> out) const {
  const CastLosses losses = round_numbers({DType::float32, std::as_bytes(numbers), overflowed},
                                          on_overflow_, path(), counted.fqn, to_, out);
  if (counted.losses != nullptr) counted.losses->add(counted.fqn, losses);
}

/// Reads a range of a weight: the rest of a row, then whole rows, then the beginning of a row.
/// Requires: the numbers of the weight are in the order of its codes.
void DequantizedReader::read_rows(const QuantizedWeight& weight, Counted counted, FlatRange range,
                                  std::span<std::byte> out) const {
  const QuantizedMatrix& matrix = weight.matrix;
  const auto size = static_cast<std::size_t>(itemsize(to_));
  std::vector<float> numbers;
  for (std::int64_t at = range.begin; at < range.end;) {
    const std::int64_t row = at / matrix.num_columns;
    const std::int64_t column = at % matrix.num_columns;
    const std::int64_t number_of_matrix = row / matrix.num_rows;
    const FlatRange in_row{
        column, std::min({matrix.num_columns, column + range.end - at, column + kPartNumel})};
    const bool is_whole = column == 0 && in_row.end == matrix.num_columns;
    const std::int64_t num_rows =
        is_whole ? std::clamp<std::int64_t>(std::min((range.end - at) / matrix.num_columns,
                                                     kPartNumel / matrix.num_columns),
                                            1, matrix.num_rows - row % matrix.num_rows)
                 : 1;
    const std::int64_t first = row % matrix.num_rows;
    numbers.resize(static_cast<std::size_t>(num_rows * in_row.numel()));
    const auto overflowed =
        matrix.decode(number_of_matrix, {first, first + num_rows}, in_row, numbers);
    round(numbers, overflowed, counted,
          out.subspan(static_cast<std::size_t>(at - range.begin) * size, numbers.size() * size));
    at += static_cast<std::int64_t>(numbers.size());
  }
}

/// Reads a range of a weight whose rows are the columns of its codes. Decodes the codes in blocks
/// of rows, and only every kNumShares-th block, beginning with block number `share`: several
/// threads read one range together, each its share.
void DequantizedReader::read_transposed(const QuantizedWeight& weight, Counted counted,
                                        FlatRange range, int share,
                                        std::span<std::byte> out) const {
  const QuantizedMatrix& matrix = weight.matrix;
  const auto size = static_cast<std::size_t>(itemsize(to_));
  std::vector<float> numbers;
  std::vector<std::byte> rounded;
  int block = 0;
  const std::int64_t in_matrix = matrix.num_rows * matrix.num_columns;
  for (std::int64_t m = range.begin / in_matrix; m * in_matrix < range.end; ++m) {
    const FlatRange own{std::max(range.begin - m * in_matrix, std::int64_t{0}),
                        std::min(range.end - m * in_matrix, in_matrix)};
    const FlatRange columns{own.begin / matrix.num_rows,
                            (own.end + matrix.num_rows - 1) / matrix.num_rows};
    const std::int64_t at_once = std::max<std::int64_t>(1, kPartNumel / columns.numel());
    for (std::int64_t row = 0; row < matrix.num_rows; row += at_once) {
      if (block++ % recipe::TileCache::kNumShares != share) continue;
      const FlatRange rows{row, std::min(row + at_once, matrix.num_rows)};
      numbers.resize(static_cast<std::size_t>(rows.numel() * columns.numel()));
      auto overflowed = matrix.decode(m, rows, columns, numbers);
      // The first and the last column may have numbers outside of the range. Another read counts
      // their losses.
      const auto is_outside = [&](std::size_t i) {
        const auto number = static_cast<std::int64_t>(i);
        const std::int64_t place = (columns.begin + number % columns.numel()) * matrix.num_rows +
                                   rows.begin + number / columns.numel();
        return place < own.begin || place >= own.end;
      };
      std::erase_if(overflowed, is_outside);
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        if (is_outside(i)) numbers[i] = 0;
      }
      rounded.resize(numbers.size() * size);
      round(numbers, overflowed, counted, rounded);
      const std::byte* from = rounded.data();
      for (std::int64_t r = rows.begin; r < rows.end; ++r) {
        for (std::int64_t c = columns.begin; c < columns.end; ++c, from += size) {
          const std::int64_t place = c * matrix.num_rows + r;
          if (place < own.begin || place >= own.end) continue;
          std::copy_n(
              from, size,
              out.data() + static_cast<std::size_t>(place + m * in_matrix - range.begin) * size);
        }
      }
    }
  }
}

}  // namespace

bool can_be_dequantized_to(DType dtype) {
  return dtype == DType::float64 || dtype == DType::float32 || dtype == DType::float16 ||
         dtype == DType::bfloat16;
}

DequantizedCheckpoint dequantize(std::unique_ptr<CheckpointReader> reader, DType to,
                                 const std::vector<Value>& configs, const NameSelection& only,
                                 reshard::OnOverflow on_overflow,
                                 std::shared_ptr<RoundingLosses> losses) {
  TESSERA_CHECK(can_be_dequantized_to(to));
  QuantizedWeights found = find_quantized_weights(*reader, configs, only);
  DequantizedCheckpoint result{.reader = nullptr,
                               .problems = std::move(found.problems),
                               .has_weights = !found.weights.empty()};
  for (const QuantizedWeight& weight : found.weights) {
    std::string name = reader->contents().tensors[weight.codes].meta.fqn;
    replace_suffix(name, weight);
    if (!only.selects(name)) continue;
    ++result.num_weights;
    result.num_companions += weight.num_companions;
  }
  if (!result.problems.empty() || found.weights.empty()) {
    result.reader = std::move(reader);
    return result;
  }
  result.reader = std::make_unique<DequantizedReader>(std::move(reader), std::move(found), to, only,
                                                      on_overflow, std::move(losses));
  return result;
}

}  // namespace tessera::arithmetic
