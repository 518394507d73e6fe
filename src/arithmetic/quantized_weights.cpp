#include "arithmetic/quantized_weights.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "arithmetic/comfyui_formats.h"
#include "arithmetic/model_config.h"
#include "base/cast.h"
#include "formats/merged_sources.h"
#include "formats/quantized_tensors.h"
#include "tessera/base/error.h"

namespace tessera::arithmetic {
namespace {

using formats::CheckpointReader;
using formats::Finding;
using formats::QuantizedPart;
using formats::QuantizedTensors;
using inspect::TensorReader;

constexpr std::int64_t kMaxSize = std::int64_t{1} << 40;

/// Why a weight cannot be turned into numbers.
struct Refusal {
  std::string expected;
  std::string found;
};

/// The parameters of the quantization in config.json.
class QuantizationConfig {
 public:
  explicit QuantizationConfig(const Value& config) {
    const Value* const text_config = config.find("text_config");
    for (const Value* const part : {&config, text_config}) {
      for (const char* key : {"quantization_config", "compression_config"}) {
        const Value* const found = part ? part->find(key) : nullptr;
        if (found != nullptr && !found->is<Value::None>() && !config_) config_ = *found;
      }
    }
    const Value* const of_modelopt = config.find(kModelOptConfigMember);
    const Value* const own = of_modelopt ? of_modelopt->find("quantization") : nullptr;
    if (own != nullptr && !config_) config_ = *own;
    bits_of_chatglm_ = integer_of(config.find("quantization_bit"));
  }

  bool is_given() const { return config_.has_value(); }
  /// Returns the number of bits that ChatGLM's own quantization stores in int8.
  std::optional<std::int64_t> bits_of_chatglm() const { return bits_of_chatglm_; }
  /// Returns the member that says that layers transform their inputs or outputs (Hadamard matrices)
  /// at each step. Without these transforms the weights are not those of the model. Empty if there
  /// is none. Transforms that were multiplied into the weights do not count.
  std::string transform_of_activations() const {
    for (const char* key : {"transform_config", "rotation_config", "spinquant_config"}) {
      const Value* const transform = config_ ? config_->find(key) : nullptr;
      if (transform == nullptr || transform->is<Value::None>()) continue;
      const auto* const members = transform->get_if<Value::Dict>();
      if (members != nullptr && members->empty()) continue;
      if (key != std::string_view("transform_config") || !is_in_weights(*transform)) return key;
    }
    return {};
  }
  std::string text(std::string_view key) const {
    const Value* const value = config_ ? config_->find(key) : nullptr;
    const auto* const text = value ? value->get_if<std::string>() : nullptr;
    return text ? *text : "";
  }
  bool is_true(std::string_view key) const {
    const Value* const value = config_ ? config_->find(key) : nullptr;
    const auto* const flag = value ? value->get_if<bool>() : nullptr;
    return flag != nullptr && *flag;
  }
  std::optional<std::int64_t> number(std::string_view key) const {
    return integer_of(config_ ? config_->find(key) : nullptr);
  }
  /// Whether the library that wrote the configuration has an older version than this; nothing if
  /// the configuration does not say.
  std::optional<bool> is_version_before(int major, int minor) const {
    const std::string version = text("version");
    std::array<int, 2> numbers{};
    const char* at = version.data();
    const char* const end = at + version.size();
    for (int& number : numbers) {
      const auto [next, error] = std::from_chars(at, end, number);
      if (error != std::errc()) return std::nullopt;
      at = next == end ? next : next + 1;  // past the dot
    }
    return numbers < std::array<int, 2>{major, minor};
  }
  using Block = std::pair<std::int64_t, std::int64_t>;
  /// Returns the sizes (rows, columns) of the blocks that share a scale, as the configuration names
  /// them.
  std::set<Block> blocks() const {
    std::set<Block> all;
    const auto add = [&](const std::optional<Block>& block) {
      if (block) all.insert(*block);
    };
    add(block_of(config_ ? config_->find("weight_block_size") : nullptr));
    if (text("quant_algo") == "fp8_pb_wo") add(Block(128, 128));  // of ModelOpt
    for (const Value* const weights : weights_of_groups()) {
      add(block_of(weights->find("block_structure")));
      const auto group = integer_of(weights->find("group_size"));
      if (group && *group > 0) add(Block(1, *group));
    }
    return all;
  }
  /// Returns the numbers of bits per weight that the configuration names.
  std::set<std::int64_t> bits() const {
    std::set<std::int64_t> all;
    if (const auto own = number("bits")) all.insert(*own);
    for (const Value* const weights : weights_of_groups()) {
      if (const auto each = integer_of(weights->find("num_bits"))) all.insert(*each);
    }
    return all;
  }

 private:
  static std::optional<std::int64_t> integer_of(const Value* value) {
    const auto* const integer = value ? value->get_if<std::int64_t>() : nullptr;
    return integer ? std::optional(*integer) : std::nullopt;
  }
  static std::optional<Block> block_of(const Value* value) {
    const auto* const list = value ? value->get_if<Value::List>() : nullptr;
    if (list == nullptr || list->size() != 2) return std::nullopt;
    const auto rows = integer_of(&list->front());
    const auto columns = integer_of(&list->back());
    if (!rows || !columns || *rows < 1 || *columns < 1) return std::nullopt;
    return Block(*rows, *columns);
  }
  /// Whether all transforms of compressed-tensors are part of the weights.
  static bool is_in_weights(const Value& transform_config) {
    const Value* const groups = transform_config.find("config_groups");
    const auto* const dict = groups ? groups->get_if<Value::Dict>() : nullptr;
    if (dict == nullptr) return false;
    return std::ranges::all_of(*dict, [](const auto& group) {
      const Value* const apply = group.second.find("apply");
      const auto* const places = apply ? apply->template get_if<Value::List>() : nullptr;
      if (places == nullptr) return false;
      return std::ranges::all_of(*places, [](const Value& place) {
        const Value* const location = place.find("location");
        const auto* const text = location ? location->get_if<std::string>() : nullptr;
        return text != nullptr && (*text == "weight_input" || *text == "weight_output");
      });
    });
  }
  /// Returns the member `weights` of each member of `config_groups` (compressed-tensors).
  std::vector<const Value*> weights_of_groups() const {
    std::vector<const Value*> result;
    const Value* const groups = config_ ? config_->find("config_groups") : nullptr;
    const auto* const dict = groups ? groups->get_if<Value::Dict>() : nullptr;
    if (dict == nullptr) return result;
    for (const auto& [name, group] : *dict) {
      const Value* const weights = group.find("weights");
      if (weights != nullptr) result.push_back(weights);
    }
    return result;
  }

  std::optional<Value> config_;
  std::optional<std::int64_t> bits_of_chatglm_;
};

/// The configurations of a checkpoint, or of each source of a merge.
class ConfigOfSources {
 public:
  ConfigOfSources(const CheckpointReader& reader, const std::vector<Value>& configs)
      : reader_(reader), configs_(configs.begin(), configs.end()) {
    if (configs_.empty()) configs_.emplace_back(Value());
  }

  /// Returns the configuration of the source that a tensor comes from.
  const QuantizationConfig& of(std::size_t tensor) const {
    if (configs_.size() == 1) return configs_.front();
    const auto source = formats::source_of_tensor(reader_, tensor);
    TESSERA_CHECK(source && *source < configs_.size());
    return configs_[*source];
  }

 private:
  const CheckpointReader& reader_;
  std::vector<QuantizationConfig> configs_;
};

/// The tensors that together store one quantized weight, as indices.
struct Parts {
  std::size_t codes;
  std::size_t scales;
  std::string_view scheme;
  std::multimap<std::string_view, std::size_t> companions;  // key: role
  std::size_t num_companions = 0;
};

class Builder {
 public:
  Builder(const CheckpointReader& reader, const QuantizationConfig& config, const Parts& parts)
      : reader_(reader),
        config_(config),
        parts_(parts),
        codes_(reader.contents().tensors[parts.codes].meta),
        scales_(without_ones(reader.contents().tensors[parts.scales].meta, codes_.shape.size())) {}

  /// Returns the weight with its scales and zero points. Throws: Refusal.
  QuantizedWeight build() const {
    for (const TensorMeta* const meta : {&codes_, &scales_}) require_sizes(meta->shape);
    if (const auto other = companion("scales")) refuse_second(parts_.scales, *other, "scales");
    if (parts_.scheme != "GPTQ or AWQ" && companion("group indices")) {
      refuse("no group indices (only GPTQ has them)", "a tensor of group indices");
    }
    if (const auto added = parts_.companions.find(formats::kLowRankRole);
        added != parts_.companions.end()) {
      refuse("no low-rank part of the weight (SVDQuant)", name_of(added->second));
    }
    require_order_of_scales();
    require_whole_int8();
    QuantizedWeight weight = build_scheme();
    set_column_factors(weight);
    require_all_used();
    return weight;
  }

 private:
  QuantizedWeight build_scheme() const {
    const std::string_view scheme = parts_.scheme;
    if (scheme == "block-scaled fp8" || scheme == "scaled fp8" || scheme == "mxfp8" ||
        scheme == "scaled int8") {
      return build_elements();
    }
    if (scheme == "mxfp4" || scheme == "nvfp4") return build_float4();
    if (scheme == "compressed-tensors packed integers") return build_packed();
    if (scheme == "GPTQ or AWQ") return build_gptq_or_awq();
    refuse("a scheme that can be dequantized (docs/combine.md#quantized-weights)",
           std::string(scheme));
  }

  /// Refuses a `weight` in fp4 or mxfp8 that no configuration describes. LightX2V stores the scales
  /// of such weights in the order of a kernel, under the names that ModelOpt uses.
  void require_order_of_scales() const {
    const std::string_view scheme = parts_.scheme;
    if (scheme != "mxfp8" && scheme != "mxfp4" && scheme != "nvfp4") return;
    if (config_.is_given() || codes_.fqn.ends_with("_packed") || codes_.fqn.ends_with("_blocks")) {
      return;
    }
    refuse(
        "a quantization_config in config.json, or hf_quant_config.json, because programs store "
        "scales of " +
            std::string(scheme) + " in several orders",
        "none");
  }

  /// Refuses int8 that is not the whole weight: two numbers of 4 bits in each element (ChatGLM), or
  /// further tensors of a scheme that Tessera does not know, such as `quant_bias` (msModelSlim).
  void require_whole_int8() const {
    constexpr std::array<std::string_view, 4> kWords = {"scal", "zero", "offset", "quant"};
    constexpr std::string_view kWeight = "weight";
    if (parts_.scheme != "scaled int8") return;
    if (const auto bits = config_.bits_of_chatglm(); bits && *bits != 0 && *bits != 8) {
      refuse("codes of 8 bits", "quantization_bit " + std::to_string(*bits) + " in config.json");
    }
    if (!codes_.fqn.ends_with(".weight")) return;
    const std::string module = codes_.fqn.substr(0, codes_.fqn.size() - kWeight.size());
    const auto& tensors = reader_.contents().tensors;
    const auto is_part = [&](std::size_t i) {
      return i == parts_.codes || i == parts_.scales ||
             std::ranges::any_of(parts_.companions,
                                 [&](const auto& companion) { return companion.second == i; });
    };
    const auto name_of_entry = [](const formats::TensorEntry& entry) -> const std::string& {
      return entry.meta.fqn;
    };
    for (auto entry = std::ranges::lower_bound(tensors, module, {}, name_of_entry);
         entry != tensors.end() && entry->meta.fqn.starts_with(module); ++entry) {
      const std::string_view key = std::string_view(entry->meta.fqn).substr(module.size());
      const bool may_change_weight =
          key.starts_with("weight_") || std::ranges::any_of(kWords, [&](std::string_view word) {
            return key.find(word) != std::string_view::npos;
          });
      if (key.find('.') != std::string_view::npos || !may_change_weight) continue;
      if (is_part(static_cast<std::size_t>(entry - tensors.begin()))) continue;
      refuse("only tensors of scaled int8 beside " + printable(codes_.fqn),
             printable(entry->meta.fqn));
    }
  }

  /// Refuses tensors that change the weight's numbers in a way that the scheme does not have, such
  /// as second scales of `scaled fp8`. Zero points and offsets that are all 0 change nothing.
  void require_all_used() const {
    constexpr std::array<std::string_view, 6> kRoles = {
        "second scales", "zero points", "scales of zero points",
        "offsets",       "code book",   "second code book"};
    for (const auto& [role, tensor] : parts_.companions) {
      if (used_.contains(role) || std::ranges::find(kRoles, role) == kRoles.end()) continue;
      if ((role == "zero points" || role == "offsets") &&
          can_cast(reader_.contents().tensors[tensor].meta.dtype, DType::float32) &&
          std::ranges::all_of(numbers_of(tensor), [](float number) { return number == 0; })) {
        continue;
      }
      refuse("no " + std::string(role) + " beside codes of " + std::string(parts_.scheme),
             name_of(tensor));
    }
  }

  /// Takes the factors of the layer's inputs into the weight: `(x * factors) @ W^T` is
  /// `x @ (W * factors)^T`.
  void set_column_factors(QuantizedWeight& weight) const {
    const auto factors = companion(formats::kInputFactorsRole);
    if (!factors) return;
    const TensorMeta& meta = reader_.contents().tensors[*factors].meta;
    const std::string module =
        meta.fqn.substr(0, meta.fqn.size() - formats::kInputFactorsSuffix.size());
    const bool is_of_layer =
        codes_.fqn == module + "weight" || codes_.fqn == module + "weight_packed";
    const bool is_tied = std::ranges::any_of(
        reader_.contents().aliases,
        [&](const formats::Alias& alias) { return alias.target == codes_.fqn; });
    if (!is_of_layer || is_tied || weight.is_transposed || weight.shape.size() != 2 ||
        meta.shape != Shape{weight.shape[1]} || !can_cast(meta.dtype, DType::float32)) {
      refuse("factors of inputs for the columns of a layer's own weight " +
                 shape_to_string(weight.shape),
             meta.fqn + " " + shape_to_string(meta.shape));
    }
    weight.matrix.column_factors = numbers_of(*factors);
    for (const float factor : weight.matrix.column_factors) {
      if (!std::isfinite(factor)) refuse("finite factors of inputs", meta.fqn + " with others");
    }
  }

  [[noreturn]] static void refuse(std::string expected, std::string found) {
    throw Refusal{std::move(expected), std::move(found)};
  }
  /// Removes the dimensions of size 1 that ModelOpt adds to the scales of a matrix: [rows of
  /// blocks, 1, columns of blocks, 1] becomes [rows of blocks, columns of blocks].
  static TensorMeta without_ones(TensorMeta scales, std::size_t num_dimensions) {
    const Shape& shape = scales.shape;
    if (num_dimensions == 2 && shape.size() == 4 && shape[1] == 1 && shape[3] == 1) {
      scales.shape = {shape[0], shape[2]};
    }
    return scales;
  }
  /// Refuses sizes above 2^40, so that a size times a small factor, such as 8 codes in a word, fits
  /// into 64 bits.
  static void require_sizes(const Shape& shape) {
    for (const std::int64_t size : shape) {
      if (size < 0 || size > kMaxSize) refuse("sizes up to 2^40", shape_to_string(shape));
    }
  }
  [[noreturn]] void refuse_second(std::size_t first, std::size_t second,
                                  std::string_view role) const {
    refuse("one tensor of " + std::string(role) + " for these codes",
           name_of(first) + " and " + name_of(second));
  }
  [[noreturn]] void refuse_scales(const std::string& expected) const {
    refuse(expected, scales_.fqn + " " + shape_to_string(scales_.shape));
  }

  std::optional<std::size_t> companion(std::string_view role) const {
    const auto [first, last] = parts_.companions.equal_range(role);
    if (first == last) return std::nullopt;
    used_.insert(role);
    // Tied codes may have companions under each of their names.
    if (std::next(first) != last) refuse_second(first->second, std::next(first)->second, role);
    return first->second;
  }
  TensorReader open(std::size_t tensor) const { return TensorReader(reader_, tensor); }
  const std::string& name_of(std::size_t tensor) const {
    return reader_.contents().tensors[tensor].meta.fqn;
  }

  /// Returns the matrices in codes of this shape: the last two dimensions are rows and columns, the
  /// others count the matrices.
  QuantizedMatrix matrix_of(const Shape& shape, CodeForm form) const {
    if (shape.size() < 2) refuse("codes with two dimensions or more", shape_to_string(shape));
    QuantizedMatrix matrix{.num_rows = shape[shape.size() - 2],
                           .num_columns = shape.back(),
                           .codes = open(parts_.codes),
                           .form = form,
                           .scales = open(parts_.scales)};
    for (std::size_t d = 0; d + 2 < shape.size(); ++d) matrix.num_matrices *= shape[d];
    matrix.are_exponents = scales_.dtype == DType::uint8;
    return matrix;
  }

  /// Finds the blocks from the shape of the scales: one scale for all, one for each row, or a grid.
  void set_blocks(QuantizedMatrix& matrix) const {
    const std::int64_t numel = numel_of(scales_.shape);
    const std::int64_t in_matrix = matrix.num_matrices == 0 ? 0 : numel / matrix.num_matrices;
    if (matrix.num_rows == 0 || matrix.num_columns == 0 ||
        numel != in_matrix * matrix.num_matrices || in_matrix == 0) {
      refuse_scales("equally many scales for each matrix of the codes " +
                    shape_to_string(codes_.shape));
    }
    matrix.block_rows = matrix.num_rows;
    matrix.block_columns = matrix.num_columns;
    if (in_matrix == 1) return;
    const bool has_columns = scales_.shape.size() >= 2 && scales_.shape.back() > 1;
    if (!has_columns && in_matrix == matrix.num_rows) {
      matrix.block_rows = 1;
      return;
    }
    if (scales_.shape.size() < 2)
      refuse_scales("one scale, one scale for each row, or a grid of scales");
    const std::int64_t columns = scales_.shape.back();
    const std::int64_t rows = in_matrix / columns;
    const std::set<QuantizationConfig::Block> blocks = block_sizes(matrix, rows, columns);
    if (blocks.size() != 1) {
      refuse_scales("a grid of scales for codes " + shape_to_string(codes_.shape) +
                    ", and their block size in the quantization_config of config.json");
    }
    std::tie(matrix.block_rows, matrix.block_columns) = *blocks.begin();
  }

  /// Returns the block sizes that fit a grid of `rows` x `columns` scales. Several sizes can fit a
  /// grid: 8 rows of scales for 960 rows fit blocks of 120 to 137 rows. Only some schemes fix the
  /// size.
  std::set<QuantizationConfig::Block> block_sizes(const QuantizedMatrix& matrix, std::int64_t rows,
                                                  std::int64_t columns) const {
    std::set<QuantizationConfig::Block> candidates = config_.blocks();
    if (parts_.scheme == "mxfp8" || parts_.scheme == "mxfp4") candidates = {{1, 32}};
    if (parts_.scheme == "nvfp4") candidates = {{1, 16}};
    std::set<QuantizationConfig::Block> fitting;
    for (const auto& [block_rows, block_columns] : candidates) {
      if ((matrix.num_rows - 1) / block_rows + 1 != rows ||
          (matrix.num_columns - 1) / block_columns + 1 != columns) {
        continue;
      }
      // A block may be larger than the weight. Then the block gets the weight's size, so that sums
      // of sizes do not overflow.
      fitting.emplace(std::min(block_rows, matrix.num_rows),
                      std::min(block_columns, matrix.num_columns));
    }
    return fitting;
  }

  void set_zeros(QuantizedMatrix& matrix, CodeForm form, const Shape& expected) const {
    const auto zeros = companion("zero points");
    if (!zeros) return;
    const TensorMeta& meta = reader_.contents().tensors[*zeros].meta;
    if (numel_of(meta.shape) != numel_of(expected)) {
      refuse("zero points " + shape_to_string(expected),
             meta.fqn + " " + shape_to_string(meta.shape));
    }
    if (form == CodeForm::elements ? !can_cast(meta.dtype, DType::float32)
                                   : meta.dtype != DType::int32) {
      refuse("zero points that are integers", std::string(dtype_name(meta.dtype)));
    }
    matrix.zeros.emplace(open(*zeros));
    matrix.zero_form = form;
  }

  QuantizedWeight build_elements() const {
    const Shape shape = codes_.shape.size() == 1 ? Shape{1, codes_.shape[0]} : codes_.shape;
    QuantizedWeight weight{.shape = codes_.shape, .matrix = matrix_of(shape, CodeForm::elements)};
    set_blocks(weight.matrix);
    set_zeros(weight.matrix, CodeForm::elements, scales_.shape);
    return weight;
  }

  /// Returns the only number in a tensor of one element, such as a second scale.
  float number_of(std::size_t tensor) const {
    const TensorMeta& meta = reader_.contents().tensors[tensor].meta;
    if (meta.numel() != 1 || !can_cast(meta.dtype, DType::float32)) {
      refuse("a second scale that is one number", meta.fqn + " " + shape_to_string(meta.shape));
    }
    return numbers_of(tensor).front();
  }

  std::vector<float> numbers_of(std::size_t tensor) const {
    const TensorMeta& meta = reader_.contents().tensors[tensor].meta;
    std::vector<std::byte> bytes(static_cast<std::size_t>(meta.nbytes()));
    open(tensor).read({0, meta.numel()}, bytes);
    std::vector<float> numbers(static_cast<std::size_t>(meta.numel()));
    cast_elements(meta.dtype, bytes, DType::float32, std::as_writable_bytes(std::span(numbers)));
    return numbers;
  }

  QuantizedWeight build_float4() const {
    const bool has_blocks = codes_.fqn.ends_with("_blocks");  // of gpt-oss: [..., rows, groups, 16]
    Shape shape = codes_.shape;
    if (has_blocks) {
      if (shape.size() < 3) refuse("blocks with three dimensions or more", shape_to_string(shape));
      shape[shape.size() - 2] *= shape.back();
      shape.resize(shape.size() - 1);
    }
    if (shape.empty()) refuse("codes with two dimensions or more", "codes without dimensions");
    shape.back() *= 2;
    QuantizedWeight weight{.shape = shape, .matrix = matrix_of(shape, CodeForm::fp4_pairs)};
    set_blocks(weight.matrix);
    if (const auto second = companion("second scales")) {
      const bool divides = reader_.contents().tensors[*second].meta.fqn.ends_with("_global_scale");
      (divides ? weight.matrix.scale_divisor : weight.matrix.scale_factor) = number_of(*second);
    } else if (parts_.scheme == "nvfp4") {
      refuse("a second scale, one number for the whole weight", "none");
    }
    if (has_blocks) {
      weight.is_transposed = true;
      std::swap(weight.shape.back(), weight.shape[weight.shape.size() - 2]);
      weight.codes_suffix = "_blocks";
    } else if (codes_.fqn.ends_with("_packed")) {
      weight.codes_suffix = "_packed";
    }
    return weight;
  }

  std::vector<std::int64_t> integers_of(std::size_t tensor) const {
    const TensorMeta& meta = reader_.contents().tensors[tensor].meta;
    if ((meta.dtype != DType::int32 && meta.dtype != DType::int64) || meta.numel() > (1 << 24)) {
      refuse("integers", meta.fqn + " " + std::string(dtype_name(meta.dtype)));
    }
    std::vector<std::byte> bytes(static_cast<std::size_t>(meta.nbytes()));
    open(tensor).read({0, meta.numel()}, bytes);
    std::vector<double> numbers(static_cast<std::size_t>(meta.numel()));
    cast_elements(meta.dtype, bytes, DType::float64, std::as_writable_bytes(std::span(numbers)));
    for (const double number : numbers) {
      if (std::fabs(number) > static_cast<double>(kMaxSize)) {
        refuse("numbers up to 2^40", meta.fqn + " with larger numbers");
      }
    }
    return {numbers.begin(), numbers.end()};
  }

  QuantizedWeight build_packed() const {
    const auto described = companion("shape");
    if (!described) refuse("a tensor that holds the shape of the weight", "none");
    const Shape shape = [&] {
      const auto sizes = integers_of(*described);
      return Shape(sizes.begin(), sizes.end());
    }();
    require_sizes(shape);
    const bool has_rows = shape.size() == codes_.shape.size() && shape.size() >= 2 &&
                          std::equal(shape.begin(), shape.end() - 1, codes_.shape.begin()) &&
                          shape.back() > 0;
    if (!has_rows) {
      refuse("codes whose shape fits a weight of shape " + shape_to_string(shape),
             shape_to_string(codes_.shape));
    }
    QuantizedWeight weight{.codes_suffix = "_packed",
                           .shape = shape,
                           .matrix = matrix_of(shape, CodeForm::signed_columns)};
    set_blocks(weight.matrix);
    weight.matrix.packing =
        packing_of(shape.back(), codes_.shape.back(),
                   companion("zero points") ? weight.matrix.num_block_rows() : 0);
    Shape packed = scales_.shape;
    if (packed.size() >= 2) {
      packed[packed.size() - 2] = weight.matrix.packing.num_words(weight.matrix.num_block_rows());
    }
    set_zeros(weight.matrix, CodeForm::signed_rows, packed);
    return weight;
  }

  /// Returns how `numel` integers are packed in a row of `num_words` words of 32 bits. Before
  /// version 0.18, compressed-tensors put whole integers into each word.
  /// `num_zero_rows`: how many zero points are packed in the same way; 0 if there are none.
  IntegerPacking packing_of(std::int64_t numel, std::int64_t num_words,
                            std::int64_t num_zero_rows) const {
    const std::set<std::int64_t> given = config_.bits();
    const std::optional<bool> is_old = config_.is_version_before(0, 18);
    std::vector<IntegerPacking> possible;
    for (int bits = 1; bits <= 8; ++bits) {
      if (!given.empty() && !given.contains(bits)) continue;
      for (const bool has_whole_integers : {false, true}) {
        const IntegerPacking packing{bits, has_whole_integers};
        // With few integers, or bits that fill a word, both ways are the same.
        const std::int64_t most = std::max(numel, num_zero_rows);
        if (has_whole_integers && (32 % bits == 0 || most <= 32 / bits)) continue;
        if (packing.num_words(numel) == num_words) possible.push_back(packing);
      }
    }
    if (possible.size() == 2 && possible[0].bits == possible[1].bits && is_old) {
      return possible[*is_old ? 1 : 0];
    }
    if (possible.size() == 1) return possible.front();
    std::string found;
    for (const IntegerPacking& packing : possible) {
      found += (found.empty() ? "" : ", ") + std::to_string(packing.bits) +
               (packing.has_whole_integers ? " (whole integers in each word)" : "");
    }
    refuse("one number of bits in config.json that packs " + std::to_string(numel) +
               " integers into " + std::to_string(num_words) + " words of 32 bits",
           found.empty() ? "none" : found);
  }

  QuantizedWeight build_gptq_or_awq() const {
    const auto zeros = companion("zero points");
    const bool is_table = codes_.shape.size() == 2 && scales_.shape.size() == 2;
    if (!is_table || !zeros) {
      if (!zeros) refuse("a tensor qzeros beside qweight", "none");
      refuse("qweight and scales with two dimensions",
             shape_to_string(codes_.shape) + " and " + shape_to_string(scales_.shape));
    }
    const std::int64_t num_columns = scales_.shape[1];
    const bool is_awq = codes_.shape[1] != num_columns;
    if (is_awq && codes_.shape[1] * 8 != num_columns) {
      refuse_scales("scales whose shape fits codes " + shape_to_string(codes_.shape));
    }
    const TensorMeta& zeros_meta = reader_.contents().tensors[*zeros].meta;
    const std::int64_t zero_words = zeros_meta.shape.size() == 2 ? zeros_meta.shape[1] : 0;
    const std::int64_t bits = is_awq || num_columns == 0 ? 4 : zero_words * 32 / num_columns;
    if (bits != 2 && bits != 4 && bits != 8) {
      refuse("codes of 2, 4 or 8 bits", std::to_string(bits) + " bits");
    }
    if (const auto given = config_.number("bits"); given && *given != bits) {
      refuse("codes of " + std::to_string(*given) + " bits, as config.json says",
             "codes of " + std::to_string(bits));
    }
    const std::int64_t num_rows = is_awq ? codes_.shape[0] : codes_.shape[0] * 32 / bits;
    if (num_rows == 0 || num_columns == 0) refuse("at least one code", "none");
    QuantizedWeight weight{.codes_suffix = "qweight",
                           .suffix = "weight",
                           .shape = {num_columns, num_rows},
                           .is_transposed = true,
                           .matrix = matrix_of({num_rows, num_columns},
                                               is_awq ? CodeForm::awq_columns : CodeForm::rows)};
    weight.matrix.packing.bits = static_cast<int>(bits);
    weight.matrix.block_rows = scales_.shape[0] == 0 ? 1 : group_rows(num_rows);
    set_zeros(weight.matrix, is_awq ? CodeForm::awq_columns : CodeForm::columns,
              {scales_.shape[0], num_columns * bits / 32});
    if (!is_awq) {
      weight.matrix.zero_added = added_to_zeros();
      if (weight.matrix.zero_added != 0.0F && !config_.is_true("sym")) {
        weight.num_disputed_zeros = count_largest(*weight.matrix.zeros, weight.matrix.packing);
      }
    }
    set_groups(weight.matrix);
    if (is_awq && !weight.matrix.row_blocks.empty()) {
      refuse("group indices in the order of the rows (only GPTQ has others)",
             name_of(*companion("group indices")));
    }
    return weight;
  }

  /// Counts the integers of which all bits are 1, in words that are full of integers.
  static std::int64_t count_largest(const TensorReader& words, IntegerPacking packing) {
    constexpr std::int64_t kWordsAtOnce = std::int64_t{1} << 18;
    const auto largest = (1U << packing.bits) - 1U;
    std::int64_t result = 0;
    std::vector<std::uint32_t> part;
    for (std::int64_t at = 0; at < words.meta().numel(); at += kWordsAtOnce) {
      const FlatRange range{at, std::min(at + kWordsAtOnce, words.meta().numel())};
      part.resize(static_cast<std::size_t>(range.numel()));
      words.read(range, std::as_writable_bytes(std::span(part)));
      for (std::uint32_t word : part) {
        for (int i = 0; i < 32 / packing.bits; ++i, word >>= packing.bits) {
          if ((word & largest) == largest) ++result;
        }
      }
    }
    return result;
  }

  /// Returns what must be added to GPTQ's stored zero points: 1 in the first version of the format.
  float added_to_zeros() const {
    const std::string method = config_.text("quant_method");
    const bool is_auto_round = method == "auto-round";
    const std::string format = config_.text(is_auto_round ? "packing_format" : "checkpoint_format");
    if (method == "gptq") {
      if (format.empty() || format == "gptq") return 1.0F;
      if (format == "gptq_v2") return 0.0F;
    }
    if (is_auto_round) {
      if (format == "auto_round:auto_gptq" || format == "auto_round:gptq") return 1.0F;
      if (format == "auto_round:gptqmodel" || format == "auto_round") return 0.0F;
    }
    std::string found = "none";
    if (!method.empty()) {
      found = printable(method) + (format.empty() ? "" : " in format " + printable(format));
    }
    refuse("a config.json that says how GPTQ stores zero points (quantization_config)", found);
  }

  std::int64_t group_rows(std::int64_t num_rows) const {
    const std::int64_t num_groups = scales_.shape[0];
    const auto given = config_.number("group_size");
    if (given && *given > 0 && (num_rows - 1) / *given + 1 == num_groups) {
      return std::min(*given, num_rows);
    }
    if (num_rows % num_groups != 0) refuse_scales("scales for groups of equal size");
    return num_rows / num_groups;
  }

  /// Sets the group of each row, unless the groups are consecutive ranges of rows.
  void set_groups(QuantizedMatrix& matrix) const {
    const auto indices = companion("group indices");
    if (!indices) return;
    const auto groups = integers_of(*indices);
    const std::int64_t num_groups = scales_.shape[0];
    if (static_cast<std::int64_t>(groups.size()) != matrix.num_rows) {
      refuse(std::to_string(matrix.num_rows) + " group indices", std::to_string(groups.size()));
    }
    bool is_trivial = true;
    for (std::size_t r = 0; r < groups.size(); ++r) {
      if (groups[r] < 0 || groups[r] >= num_groups) {
        refuse("group indices below " + std::to_string(num_groups), std::to_string(groups[r]));
      }
      is_trivial = is_trivial && groups[r] == static_cast<std::int64_t>(r) / matrix.block_rows;
      matrix.row_blocks.push_back(static_cast<std::int32_t>(groups[r]));
    }
    matrix.num_row_blocks = num_groups;
    if (is_trivial) matrix.row_blocks.clear();
  }

  const CheckpointReader& reader_;
  const QuantizationConfig& config_;
  const Parts& parts_;
  const TensorMeta& codes_;
  const TensorMeta scales_;
  mutable std::set<std::string_view> used_{};  // roles of the companions that were asked for
};

/// Whether a tensor that is part of no known scheme holds codes rather than numbers, as its dtype,
/// its name and config.json show.
bool look_like_codes(const TensorMeta& meta, const QuantizationConfig& config) {
  constexpr std::array<std::string_view, 4> kPacked = {"_packed", "qweight", "_blocks", ".W_q"};
  const bool is_matrix = config.is_given() && meta.shape.size() >= 2;
  switch (meta.dtype) {
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
      return true;
    case DType::int8:
      return is_matrix && meta.fqn.ends_with("weight");
    case DType::uint8:
    case DType::int32:
      return is_matrix && (meta.fqn.ends_with("weight") ||
                           std::ranges::any_of(kPacked, [&](std::string_view suffix) {
                             return meta.fqn.ends_with(suffix);
                           }));
    default:
      return false;
  }
}

/// Reports tensors that look like codes (look_like_codes) but have no scales.
void find_codes_without_scales(const CheckpointReader& reader, const QuantizedTensors& quantized,
                               const ConfigOfSources& configs, const NameSelection& only,
                               std::vector<Finding>& problems) {
  const auto& tensors = reader.contents().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorMeta& meta = tensors[i].meta;
    if (quantized.find(i) != nullptr || !only.selects(meta.fqn)) continue;
    if (!look_like_codes(meta, configs.of(i))) continue;
    problems.push_back(
        {.severity = Finding::Severity::error,
         .rule = "dequantize",
         .where = {.path = reader.path(), .fqn = meta.fqn},
         .expected = "a scale beside codes of " + std::string(dtype_name(meta.dtype)),
         .found = "none"});
  }
}

/// Reports a configuration that says that layers transform their inputs or outputs, if `only`
/// selects one of its weights.
void find_transforms(const CheckpointReader& reader, const std::vector<QuantizedWeight>& weights,
                     const ConfigOfSources& configs, const NameSelection& only,
                     std::vector<Finding>& problems) {
  for (const QuantizedWeight& weight : weights) {
    if (!only.selects(reader.contents().tensors[weight.codes].meta.fqn)) continue;
    const std::string member = configs.of(weight.codes).transform_of_activations();
    if (member.empty()) continue;
    problems.push_back({.severity = Finding::Severity::error,
                        .rule = "dequantize",
                        .where = {.path = reader.path()},
                        .expected = "layers that do not transform their inputs or outputs, "
                                    "because weights alone are then not the model",
                        .found = member + " in config.json"});
    return;
  }
}

/// Reports the scales by which AWQ's models divide the output of an activation: other programs do
/// not divide, so the weights alone are not the model.
void find_scaled_activations(const CheckpointReader& reader, const NameSelection& only,
                             std::vector<Finding>& problems) {
  for (const auto& tensor : reader.contents().tensors) {
    const std::string& name = tensor.meta.fqn;
    if (!name.ends_with(".act.scales") && !name.ends_with(".gelu_impl.scales")) continue;
    if (!only.selects(name)) continue;
    problems.push_back({.severity = Finding::Severity::error,
                        .rule = "dequantize",
                        .where = {.path = reader.path(), .fqn = name},
                        .expected = "activations that are not divided by scales of AWQ",
                        .found = "scales of an activation"});
  }
}

}  // namespace

QuantizedWeights find_quantized_weights(const CheckpointReader& reader,
                                        const std::vector<Value>& configs,
                                        const NameSelection& only) {
  const QuantizedTensors quantized(reader.contents());
  const ConfigOfSources described(reader, configs);
  QuantizedWeights result;
  std::map<std::size_t, Parts> weights;  // key: index of the codes
  const auto& tensors = reader.contents().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (quantized.are_codes(i)) {
      const QuantizedPart* const part = quantized.find(i);
      weights.emplace(i, Parts{i, part->partner, part->scheme, {}, 0});
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const QuantizedPart* const part = quantized.find(i);
    if (part == nullptr || quantized.are_codes(i)) continue;
    result.companions.insert(i);
    const auto weight = weights.find(part->partner);
    if (weight == weights.end()) continue;
    ++weight->second.num_companions;
  }
  for (const formats::QuantizedLink& link : quantized.links()) {
    const auto weight = weights.find(link.codes);
    if (weight == weights.end() || weight->second.scales == link.tensor) continue;
    weight->second.companions.emplace(link.role, link.tensor);
  }
  for (const auto& [codes, parts] : weights) {
    try {
      QuantizedWeight weight = Builder(reader, described.of(codes), parts).build();
      weight.codes = codes;
      weight.num_companions = parts.num_companions;
      result.weights.push_back(std::move(weight));
    } catch (const Refusal& refusal) {
      if (!only.selects(tensors[codes].meta.fqn)) continue;
      result.problems.push_back({.severity = Finding::Severity::error,
                                 .rule = "dequantize",
                                 .where = {.path = reader.path(), .fqn = tensors[codes].meta.fqn},
                                 .expected = refusal.expected,
                                 .found = refusal.found});
    }
  }
  const bool has_awq = std::ranges::any_of(result.weights, [](const QuantizedWeight& weight) {
    return weight.matrix.form == CodeForm::awq_columns;
  });
  if (has_awq) find_scaled_activations(reader, only, result.problems);
  find_transforms(reader, result.weights, described, only, result.problems);
  const auto of_comfyui = find_formats_of_comfyui(reader, only);
  result.problems.insert(result.problems.end(), of_comfyui.begin(), of_comfyui.end());
  if (!weights.empty()) {
    find_codes_without_scales(reader, quantized, described, only, result.problems);
  }
  return result;
}

}  // namespace tessera::arithmetic
