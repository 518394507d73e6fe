#include "arithmetic/lora_adapter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>

#include "arithmetic/source_match.h"
#include "base/digest.h"
#include "base/json.h"
#include "base/python_regex.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"

namespace tessera::arithmetic {
namespace {

using formats::CheckpointContents;
using formats::TensorEntry;

constexpr std::uint64_t kMaxConfigNbytes = std::uint64_t{16} << 20;
constexpr std::string_view kNamePrefix = "base_model.model.";

// Options in adapter_config.json. If one is set, the adapter adds more than a product of two
// matrices, so Tessera refuses the adapter.
constexpr std::array<std::string_view, 10> kUnsupported = {
    "use_dora",          "use_qalora",
    "use_bdlora",        "layer_replication",
    "arrow_config",      "kasa_config",
    "monteclora_config", "trainable_token_indices",
    "target_parameters", "alora_invocation_tokens"};

/// Whether an option is set. Null, false, 0 and empty values count as not set, as in Python.
bool is_given(const Value* value) {
  if (value == nullptr || value->is<Value::None>()) return false;
  if (const auto* flag = value->get_if<bool>()) return *flag;
  if (const auto* integer = value->get_if<std::int64_t>()) return *integer != 0;
  if (const auto* number = value->get_if<double>()) return *number != 0.0;
  if (const auto* text = value->get_if<std::string>()) return !text->empty();
  if (const auto* list = value->get_if<Value::List>()) return !list->empty();
  if (const auto* dict = value->get_if<Value::Dict>()) return !dict->empty();
  return true;
}

std::optional<double> number_of(const Value& value) {
  if (const auto* integer = value.get_if<std::int64_t>()) return static_cast<double>(*integer);
  if (const auto* number = value.get_if<double>()) return *number;
  return std::nullopt;
}

/// A numeric option with a value for each module, as an adapter's configuration states it: one
/// value for all modules, and others for modules whose names match a pattern.
class NumbersOfModules {
 public:
  /// Throws: Error(corruption) if `for_all` or `by_pattern`, members of `config`, have another
  /// form; Error(unsupported) for a pattern that PythonRegex refuses.
  NumbersOfModules(const Value& config, std::string path, const char* for_all,
                   const char* by_pattern)
      : path_(std::move(path)), by_pattern_(by_pattern), for_all_(required(config, for_all)) {
    const Value* const patterns = config.find(by_pattern);
    if (!is_given(patterns)) return;
    const auto* const dict = patterns->get_if<Value::Dict>();
    if (dict == nullptr) refuse(by_pattern_, "a dict of patterns", value_to_string(*patterns, 40));
    constexpr std::size_t kMaxPatterns = 10'000;
    if (dict->size() > kMaxPatterns) {
      refuse(by_pattern_, "at most " + std::to_string(kMaxPatterns) + " entries",
             std::to_string(dict->size()));
    }
    for (const auto& [key, number] : *dict) add_pattern(key, number);
  }

  double of(const std::string& module) const {
    for (const Pattern& pattern : patterns_) {
      if (pattern.regex.matches(module)) return pattern.number;
    }
    return for_all_;
  }

 private:
  [[noreturn]] void refuse(const std::string& member, const std::string& expected,
                           const std::string& found) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, member, expected, found);
  }

  double required(const Value& config, const std::string& member) const {
    const Value* const value = config.find(member);
    const auto number = value ? number_of(*value) : std::nullopt;
    if (!number) refuse(member, "a number", value ? value_to_string(*value, 40) : "none");
    return *number;
  }

  /// A pattern of the names of modules.
  struct Pattern {
    tessera::detail::PythonRegex regex;
    double number;
  };

  /// Adds a pattern. As in PEFT, it matches the last components of a module's name.
  void add_pattern(const Value& key, const Value& value) {
    const auto* const text = key.get_if<std::string>();
    const auto number = number_of(value);
    if (text == nullptr || !number) refuse(by_pattern_, "a number", value_to_string(value, 40));
    patterns_.push_back({{"(.*\\.)?(" + *text + ")$", path_, by_pattern_}, *number});
    constexpr std::size_t kMaxNumSteps = 2'000'000;  // 100 MB, and a few minutes of matching
    num_steps_ += patterns_.back().regex.num_steps();
    if (num_steps_ > kMaxNumSteps) {
      refuse(by_pattern_, "regular expressions with at most 2,000,000 characters in all",
             "more (repetitions {m,n} are counted as written out)");
    }
  }

  std::string path_;
  std::string by_pattern_;
  double for_all_;
  std::vector<Pattern> patterns_;
  std::size_t num_steps_ = 0;  // of all patterns
};

/// The scales of an adapter's changes, as its configuration states them.
class Scales {
 public:
  Scales(const Value& config, const std::string& path, double given)
      : path_(path),
        given_(given),
        is_rank_stabilized_(is_given(config.find("use_rslora"))),
        alphas_(config, path, "lora_alpha", "alpha_pattern") {
    if (config.find("r") != nullptr) ranks_.emplace(config, path, "r", "rank_pattern");
  }

  /// Returns the scale of a module: the factor of the product of its two matrices, which have
  /// `rank` columns and rows. Throws: Error(corruption) if the configuration states another rank,
  /// because PEFT divides by the rank in the configuration.
  double of(const std::string& module, std::int64_t rank) const {
    const auto divisor = static_cast<double>(rank);
    if (const double stated = ranks_ ? ranks_->of(module) : divisor; stated != divisor) {
      throw Error::expected(ErrorKind::corruption, {.path = path_, .fqn = module},
                            "r, or rank_pattern", std::to_string(rank) + ", as in the matrices",
                            value_to_string(Value(stated)), "a configuration of another adapter?");
    }
    return given_ * (alphas_.of(module) / (is_rank_stabilized_ ? std::sqrt(divisor) : divisor));
  }

 private:
  std::string path_;
  double given_;
  bool is_rank_stabilized_;
  NumbersOfModules alphas_;
  std::optional<NumbersOfModules> ranks_;
};

/// Refuses adapters whose initialization changed the weights of the base, such as PiSSA and OLoRA.
/// When PEFT loads such an adapter, it changes the weights of the base again, so the sum of base
/// and adapter is not the model.
void require_plain_initialization(const Value& config, const std::string& path) {
  constexpr std::string_view kMember = "init_lora_weights";
  constexpr std::array<std::string_view, 7> kPlain = {"",           "gaussian", "Gaussian", "eva",
                                                      "orthogonal", "mica",     "MiCA"};
  const Value* const given = config.find(kMember);
  const auto* const text = given ? given->get_if<std::string>() : nullptr;
  if (text == nullptr || std::ranges::find(kPlain, *text) != kPlain.end()) return;
  throw Error::expected(ErrorKind::unsupported, {.path = path}, std::string(kMember),
                        "an initialization that leaves the weights of the base as they are",
                        value_to_string(*given, 40),
                        "let PEFT convert the adapter: save_pretrained with "
                        "path_initial_model_for_weight_conversion");
}

void require_plain_lora(const Value& config, const std::string& path) {
  const Value* const type = config.find("peft_type");
  const auto* const name = type ? type->get_if<std::string>() : nullptr;
  if (name == nullptr || *name != "LORA") {
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "peft_type", "LORA",
                          type ? value_to_string(*type, 40) : "none");
  }
  for (const std::string_view member : kUnsupported) {
    if (!is_given(config.find(member))) continue;
    throw Error::expected(
        ErrorKind::unsupported, {.path = path}, member,
        "this option to be unset, because only plain LoRA (two matrices for each weight) "
        "can be merged",
        value_to_string(*config.find(member), 40));
  }
  require_plain_initialization(config, path);
}

void remove_all(std::string& text, std::string_view part) {
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part)) {
    text.erase(at, part.size());
  }
}

/// The adapter's tensors for one layer, as indices.
struct Layer {
  std::optional<std::size_t> down;
  std::optional<std::size_t> up;
  std::optional<std::size_t> bias;
  bool is_embedding = false;
  bool is_second_name = true;  // each of its tensors has another name, its own
};

/// Groups an adapter's tensors by layer.
class AdapterNames {
 public:
  AdapterNames(LoraAdapter& adapter, const Scales& scales, bool stores_transposed)
      : adapter_(adapter),
        tensors_(adapter.reader->contents().tensors),
        scales_(scales),
        stores_transposed_(stores_transposed) {}

  void sort() {
    const CheckpointContents& contents = adapter_.reader->contents();
    std::map<std::string_view, std::size_t> indices;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      indices.emplace(tensors_[i].meta.fqn, i);
      sort(tensors_[i].meta.fqn, i, false);
    }
    for (const formats::Alias& alias : contents.aliases) {
      sort(alias.fqn, indices.at(alias.target), true);
    }
    for (const auto& [module, layer] : layers_) add(module, layer);
    std::ranges::stable_sort(adapter_.changes, {}, &AdapterChange::target);
  }

 private:
  void problem(std::size_t tensor, const std::string& expected, const std::string& found) {
    formats::Finding finding = combine_problem(tensors_[tensor].meta.fqn, expected, found);
    finding.where.path = adapter_.reader->path();
    adapter_.problems.push_back(std::move(finding));
  }

  /// Sorts a tensor by one of its names: layers that share a tensor have a name each.
  void sort(std::string name, std::size_t tensor, bool is_second_name) {
    if (name.starts_with(kNamePrefix)) name.erase(0, kNamePrefix.size());
    constexpr std::array<std::string_view, 4> kRoles = {".lora_A", ".lora_B", ".lora_embedding_A",
                                                        ".lora_embedding_B"};
    for (const std::string_view role : kRoles) {
      const std::size_t at = name.rfind(role);
      if (at == std::string::npos) continue;
      const std::string rest = name.substr(at + role.size());
      if (!rest.empty() && rest.front() != '.') continue;
      std::string module = name.substr(0, at);
      remove_all(module, ".base_layer");
      Layer& layer = layers_[module];
      layer.is_second_name = layer.is_second_name && is_second_name;
      return put(tensor, layer, role, rest.ends_with(".bias"));
    }
    // VeLoRA compresses activations with it in training. PEFT merges the adapter as plain LoRA.
    if (name.find(".lora_velora_embed") != std::string::npos) {
      adapter_.left_out.push_back(tensors_[tensor].meta.fqn);
      return;
    }
    if (name.find(".lora_") != std::string::npos) {
      return problem(tensor, "only tensors lora_A and lora_B",
                     "an adapter's tensor of another kind");
    }
    if (name.find(".original_module.") != std::string::npos) return;  // a copy of the base's tensor
    remove_all(name, ".modules_to_save.default");
    remove_all(name, ".modules_to_save");
    const bool is_copy_of_base = name.ends_with(".base_layer.weight");
    remove_all(name, ".base_layer");
    adapter_.changes.push_back({.target = name,
                                .kind = AdapterChange::Kind::replaced,
                                .tensor = tensor,
                                .is_copy_of_base = is_copy_of_base,
                                .is_second_name = is_second_name});
  }

  void put(std::size_t tensor, Layer& layer, std::string_view role, bool is_bias) {
    auto& place = is_bias ? layer.bias : role.ends_with('A') ? layer.down : layer.up;
    if (place && *place != tensor) {
      return problem(tensor, "one lora_A and lora_B for each layer",
                     "a second tensor of this kind (are there several adapters in the file?)");
    }
    place = tensor;
    layer.is_embedding = role.find("embedding") != std::string_view::npos;
  }

  void add(const std::string& module, const Layer& layer) {
    if (!layer.down || !layer.up) {
      return problem(layer.down ? *layer.down
                     : layer.up ? *layer.up
                                : *layer.bias,
                     "lora_A and lora_B of one layer", "only one of these two tensors");
    }
    const Shape& down = tensors_[*layer.down].meta.shape;
    const Shape& up = tensors_[*layer.up].meta.shape;
    if (down.size() < 2 || up.size() < 2 || up[1] != down[0] || numel_of(up) != up[0] * up[1] ||
        down[0] == 0) {
      return problem(*layer.up, "lora_B [rows, rank] that fits lora_A " + shape_to_string(down),
                     shape_to_string(up));
    }
    const double scale = scales_.of(module, down[0]);
    adapter_.changes.push_back({.target = module + ".weight",
                                .kind = AdapterChange::Kind::low_rank,
                                .down = *layer.down,
                                .up = *layer.up,
                                .is_second_name = layer.is_second_name,
                                .is_embedding = layer.is_embedding,
                                .is_said_to_be_transposed = stores_transposed_,
                                .scale = scale});
    if (!layer.bias) return;
    adapter_.changes.push_back({.target = module + ".bias",
                                .kind = AdapterChange::Kind::scaled,
                                .tensor = *layer.bias,
                                .is_second_name = layer.is_second_name,
                                .scale = scale});
  }

  LoraAdapter& adapter_;
  const std::vector<TensorEntry>& tensors_;
  const Scales& scales_;
  const bool stores_transposed_;
  std::map<std::string, Layer> layers_;  // key: module
};

std::string config_path_of(const FileSystem& fs, const std::string& adapter) {
  const bool is_folder = fs.kind_of(adapter) == FileKind::directory;
  return join_path(is_folder ? adapter : directory_of(adapter), kAdapterConfigName);
}

}  // namespace

LoraAdapter read_lora_adapter(std::unique_ptr<formats::CheckpointReader> reader,
                              std::string_view config, const std::string& config_path,
                              double scale) {
  const Value parsed = parse_json(config, config_path);
  require_plain_lora(parsed, config_path);
  const Scales scales(parsed, config_path, scale);
  LoraAdapter adapter{.reader = std::move(reader), .scale = scale};
  AdapterNames(adapter, scales, is_given(parsed.find("fan_in_fan_out"))).sort();
  if (adapter.changes.empty() && adapter.problems.empty()) {
    throw Error::expected(ErrorKind::mismatch, {.path = adapter.reader->path()}, "adapter",
                          "tensors, such as lora_A and lora_B", "none");
  }
  return adapter;
}

LoraAdapter open_lora_adapter(const FileSystem& fs, const std::string& path, double scale) {
  const std::string config_path = config_path_of(fs, path);
  if (fs.kind_of(config_path) != FileKind::regular) {
    const auto kind = fs.kind_of(path);
    throw Error::expected(ErrorKind::not_found, {.path = path}, "adapter",
                          "a folder of PEFT with adapter_config.json",
                          !kind                         ? "nothing"
                          : kind == FileKind::directory ? "no such file in it"
                                                        : "no such file beside it");
  }
  const std::string config = read_file(fs, config_path, kMaxConfigNbytes);
  return read_lora_adapter(formats::open_checkpoint(fs, path), config, config_path, scale);
}

std::string adapter_config_digest(const FileSystem& fs, const std::string& path) {
  const std::string config_path = config_path_of(fs, path);
  if (fs.kind_of(config_path) != FileKind::regular) return {};
  Xxh3Wide hash;
  const std::string config = read_file(fs, config_path, kMaxConfigNbytes);
  hash.update(std::as_bytes(std::span(config)));
  return hash.hex_digest();
}

}  // namespace tessera::arithmetic
