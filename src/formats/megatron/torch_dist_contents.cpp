#include "formats/megatron/torch_dist_contents.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "base/outside_failure.h"
#include "base/text_parts.h"
#include "formats/megatron/cuts_by_name.h"
#include "formats/megatron/torch_dist_names.h"
#include "formats/torch_zip.h"
#include "object_store/files.h"
#include "tessera/base/error.h"

namespace tessera::formats::megatron {
namespace {

using tessera::detail::split;
using tessera::detail::take_prefix;

constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kGroupsKey = "param_groups";
constexpr std::string_view kState = "state.";
constexpr std::string_view kStep = "step";
constexpr const char* kScaler = "grad_scaler";
/// Names of the fp32 copy of a weight in the state of optimizers.
constexpr std::array<std::string_view, 3> kCopies = {"param", "fp32_param", "master_param"};
constexpr std::array<std::string_view, 2> kOptimizers = {"optim.", "optimizer."};
constexpr std::string_view kArguments = "args";
constexpr std::string_view kContent = "content_metadata";
/// The entries of these dicts of `common.pt` that say how tensors are named.
constexpr std::array<std::string_view, 10> kRead = {"moe_layer_freq",
                                                    "linear_attention_freq",
                                                    "heterogeneous_layers_config_path",
                                                    "heterogeneous_layers_config_encoded_json",
                                                    "hetereogenous_dist_checkpoint",
                                                    "heterogeneous_block_specs",
                                                    "non_homogeneous_layers",
                                                    "singleton_local_shards",
                                                    "use_distributed_optimizer",
                                                    "params_dtype"};
constexpr std::array<std::string_view, 4> kMegatronNames = {
    "decoder.layers.", "encoder.layers.", "embedding.word_embeddings.", "output_layer."};

bool take_optimizer(std::string_view& text) {
  return std::ranges::any_of(kOptimizers,
                             [&](std::string_view each) { return take_prefix(text, each); });
}

bool holds_number(const TensorMeta& meta) {
  return meta.numel() == 1 && (meta.dtype == DType::float32 || meta.dtype == DType::float64 ||
                               meta.dtype == DType::int64 || meta.dtype == DType::int32);
}

/// Removes and returns the number that begins `text`, and removes the dot if more text follows it.
std::optional<std::int64_t> take_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(stop - text.data()));
  if (!text.empty() && !take_prefix(text, ".")) return std::nullopt;
  return number;
}

/// Returns the path in `common.pt` of an entry `<optimizer>.<rest>` of a loss scale: those of
/// several optimizers are below numbers, as in `optimizer.1.grad_scaler.scale`. Nothing for other
/// entries.
std::optional<KeyPath> scaler_path(std::string_view rest) {
  KeyPath path{"optimizer"};
  std::string_view behind = rest;
  if (const auto number = take_number(behind)) {
    path.push_back(*dict_key(Value(*number)));
    rest = behind;
  }
  if (!rest.starts_with(kScaler + std::string("."))) return std::nullopt;
  for (const std::string_view part : split(rest, '.')) path.emplace_back(std::string(part));
  return path;
}

class Sorter {
 public:
  Sorter(const CheckpointContents& contents, const std::vector<Value>& values,
         const std::string& destination, const CopiedFiles& copied)
      : contents_(contents),
        values_(values),
        destination_(destination),
        copied_(copied),
        has_common_file_(!copied.common.empty()),
        are_weights_(contents.tensors.size()),
        sorted_{.common = CommonState(destination + "/common.pt")} {}

  TorchDistContents sort() && {
    find_weights();
    if (is_torch_dist_) return std::move(*this).sort_torch_dist();
    if (is_renamed_) read_copied_arguments();
    for (const std::size_t v : values_in_order()) add_value(v);
    require_known_order_of_rows();
    const bool are_numbered = are_layers_numbered();
    const TorchDistNames names(weights_, destination_,
                               are_numbered ? LayerNames::numbered : LayerNames::stacked_if_alike);
    add_state(names);
    for (const auto& [name, meta] : weights_) add_weight(names, name);
    sorted_.common.set_layers_stacked(names.are_layers_stacked());
    if (names.are_layers_stacked()) find_stacked_unasked();
    find_regrouped();
    if (!has_objects()) {
      for (std::string& name : names.extra_states()) {
        add_object(std::move(name), Value::List{Value()});
      }
    }
    finish_dcp();
    return std::move(sorted_);
  }

 private:
  /// Keeps all names of a torch_dist checkpoint.
  TorchDistContents sort_torch_dist() && {
    for (std::size_t v = 0; v < values_.size(); ++v) add_value(v);
    for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
      add_tensor(t, {.key = contents_.tensors[t].meta.fqn});
    }
    const auto numbered = std::ranges::find_if(
        weights_, [](const auto& weight) { return has_layer_number(weight.first); });
    const bool has_numbers = numbered != weights_.end();
    sorted_.common.set_layers_stacked(!has_numbers);
    if (has_numbers && has_common_file_ && says_stacked()) {
      sorted_.numbered_unasked.push_back(numbered->second.fqn);
    }
    finish_dcp();
    return std::move(sorted_);
  }

  /// Whether a name has the number of a layer that Megatron may stack.
  static bool has_layer_number(std::string_view name) {
    return !name.starts_with("mtp.") && layer_in(name).has_value();
  }

  /// Whether the copied `common.pt` says that layers are stacked. False if it cannot be read: it is
  /// copied as it is.
  bool says_stacked() {
    try {
      read_copied_arguments();
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      return false;
    }
    const Value* const stated =
        sorted_.common.find({std::string(kContent), "non_homogeneous_layers"});
    return stated != nullptr && *stated == Value(false) && !are_layers_numbered();
  }

  /// Adds what the copied `common.pt` says about numbers of layers and copies of weights.
  void read_copied_arguments() {
    const auto file =
        open_torch_zip_with_classes(object_store::files(), copied_.common, {"argparse.Namespace"});
    const auto& values = file->contents().values;
    for (std::size_t v = 0; v < values.size(); ++v) {
      for (const std::string_view dict : {kArguments, kContent}) {
        std::string_view name = values[v].name;
        if (!take_prefix(name, dict) || !take_prefix(name, ".")) continue;
        if (std::ranges::find(kRead, name) == kRead.end()) continue;
        sorted_.common.add({std::string(dict), std::string(name)}, file->read_value(v));
      }
    }
  }

  /// Whether the source is a torch_dist checkpoint, which already has Megatron's objects.
  bool has_objects() const { return !is_renamed_ && (has_common_file_ || has_shards()); }
  bool has_shards() const {
    return std::ranges::any_of(contents_.values, [](const ValueEntry& value) {
      return value.name.find(kShard) != std::string::npos;
    });
  }

  /// Whether Megatron numbers the layers even if they are alike. It then does not find stacked
  /// ones. Source: megatron-core 0.16, TransformerBlock.sharded_state_dict.
  bool are_layers_numbered() const {
    const auto is_true = [](const Value* value) {
      const auto* const flag = value == nullptr ? nullptr : value->get_if<bool>();
      return flag != nullptr && *flag;
    };
    for (const char* const name : {"moe_layer_freq", "linear_attention_freq"}) {
      const Value* const frequency = sorted_.common.find_arg(name);
      if (frequency == nullptr) continue;
      if (frequency->is<Value::List>() || frequency->is<Value::Tuple>()) return true;
      if (as_number(*frequency).value_or(1) > 1) return true;
    }
    for (const char* const name :
         {"heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"}) {
      const Value* const config = sorted_.common.find_arg(name);
      const auto* const text = config == nullptr ? nullptr : config->get_if<std::string>();
      if (text != nullptr && !text->empty()) return true;
    }
    // "hetereogenous" is how Megatron spells it.
    for (const char* const name : {"hetereogenous_dist_checkpoint", "heterogeneous_block_specs"}) {
      if (is_true(sorted_.common.find_arg(name))) return true;
    }
    for (const char* const name : {"non_homogeneous_layers", "singleton_local_shards"}) {
      if (is_true(sorted_.common.find({std::string(kContent), name}))) return true;
    }
    // A torch_dist source: the objects of its layers have the names of its tensors.
    return std::ranges::any_of(contents_.values, [](const ValueEntry& value) {
      return value.name.find(kShard) != std::string::npos && has_layer_number(value.name);
    });
  }

  std::int64_t number_in_args(std::string_view name) const {
    const Value* const value = sorted_.common.find_arg(name);
    const auto* const number = value == nullptr ? nullptr : value->get_if<std::int64_t>();
    return number == nullptr ? 0 : *number;
  }

  /// Throws if rows of the gate and of the up projection take turns in a weight, and the run has
  /// several tensor ranks. Each rank cuts its rows into halves, and finds the first halves of all
  /// ranks before the second ones. The weight, which has all rows in their own order, would be read
  /// as another one.
  void require_known_order_of_rows() const {
    const std::int64_t num_ranks = number_in_args("tensor_model_parallel_size");
    if (num_ranks <= 1) return;
    for (const auto& [name, meta] : weights_) {
      const bool is_of_experts = is_of_expert(name);
      if (!second_of_perceptron(name) || (!is_of_experts && !is_of_shared_expert(name))) continue;
      const std::int64_t turns = number_in_args(
          is_of_experts ? "moe_mlp_glu_interleave_size" : "moe_shared_expert_glu_interleave_size");
      if (turns <= 0) continue;
      throw Error::expected(
          ErrorKind::unsupported, {.path = destination_, .fqn = meta.fqn}, "order of rows",
          "one tensor rank, where rows of the gate and of the up projection take turns every " +
              std::to_string(turns) + " rows",
          "args.tensor_model_parallel_size " + std::to_string(num_ranks) +
              ", for which Megatron stores the rows in another order",
          "for a run with one tensor rank leave this argument out; a recipe puts the gate first");
    }
  }

  void find_stacked_unasked() {
    const bool is_known =
        has_objects() || sorted_.common.find_arg("moe_layer_freq") != nullptr ||
        sorted_.common.find({std::string(kContent), "non_homogeneous_layers"}) != nullptr;
    if (is_known) return;
    const auto expert = std::ranges::find_if(weights_, [](const auto& weight) {
      return is_of_expert(weight.first) && !weight.first.starts_with("mtp.");
    });
    if (expert != weights_.end()) sorted_.stacked_unasked.push_back(expert->second.fqn);
  }

  static bool is_of_optimizer(std::string_view name) { return take_optimizer(name); }
  /// Whether an entry belongs to one rank or to a module, and so is neither a weight nor a value
  /// that goes into `common.pt`.
  static bool is_rank_or_extra_state(std::string_view name) {
    return name.starts_with("per_rank.") || name.starts_with("rng_state") ||
           name.ends_with(kExtraState);
  }

  /// Returns the indices of the values, in the order of their keys.
  std::vector<std::size_t> values_in_order() const {
    std::vector<std::size_t> order(values_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {},
                             [&](std::size_t v) { return contents_.values[v].dict_order; });
    return order;
  }

  void find_weights() {
    const bool is_bare = std::ranges::none_of(contents_.tensors, [](const TensorEntry& tensor) {
      return tensor.meta.fqn.starts_with(kModelPrefix);
    });
    for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
      std::string_view name = contents_.tensors[t].meta.fqn;
      if (is_rank_or_extra_state(name) || is_of_optimizer(name)) continue;
      if (!is_bare && !take_prefix(name, kModelPrefix)) continue;
      weights_.emplace(name, contents_.tensors[t].meta);
      weight_tensors_.emplace(name, t);
      are_weights_[t] = true;
    }
    const bool has_megatron_names = std::ranges::any_of(weights_, [](const auto& weight) {
      return std::ranges::any_of(kMegatronNames, [&](std::string_view name) {
        return weight.first.find(name) != std::string::npos;
      });
    });
    is_torch_dist_ = copied_.keep_names && copied_.has_config && has_megatron_names &&
                     (has_shards() || (is_bare && has_common_file_));
    is_renamed_ = has_common_file_ && !is_torch_dist_ && !has_shards() &&
                  std::ranges::any_of(weights_, [](const auto& weight) {
                    return layer_in(weight.first).has_value();
                  });
    if (!has_objects() && !is_torch_dist_) require_whole_matrices();
    if (weights_.empty() || has_megatron_names) return;
    throw Error::expected(
        ErrorKind::unsupported, {.path = destination_, .fqn = weights_.begin()->second.fqn},
        "names", "names of Megatron's models, such as decoder.layers.0.mlp.linear_fc1.weight",
        "none of them", "a recipe gives tensors Megatron's names: docs/from/megatron.md");
  }

  /// Throws if a weight is several matrices in one tensor: Megatron stores them in torch_dist as
  /// several tensors, or with their elements in another order.
  void require_whole_matrices() const {
    for (const auto& [name, meta] : weights_) {
      if (cut_of(name) != Cut::not_joined) continue;
      throw Error::expected(
          ErrorKind::unsupported, {.path = destination_, .fqn = meta.fqn}, "layers",
          "layers whose weights Megatron stores as they are in the model",
          is_of_expert(name)
              ? "experts in one matrix (GroupedMLP), which Megatron stores apart"
              : "a state-space layer, whose in_proj and conv1d Megatron stores in parts",
          "Tessera writes no such layers for Megatron");
    }
  }

  /// Adds tensor `t` as a DCP tensor, or as one slice of a stacked one. `dtype`: of the whole DCP
  /// tensor. Throws: Error(unsupported) if the place is taken, or if the stack has another dtype.
  void add_tensor(std::size_t t, const TorchDistPlace& place, DType dtype) {
    const TensorEntry& tensor = contents_.tensors[t];
    auto& sources = sorted_.sources[place.key];
    if (!sources.emplace(place.index, t).second ||
        sources.begin()->first.size() != place.index.size()) {
      throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = tensor.meta.fqn},
                            "names", "one tensor for the name '" + place.key + "'", "two");
    }
    TensorEntry& entry = tensors_[place.key];
    if (sources.size() > 1 && entry.meta.dtype != dtype) {
      const auto first = std::ranges::find_if(sources, [&](const auto& source) {
                           return source.second != t;
                         })->second;
      throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = tensor.meta.fqn},
                            "dtype of the layers, which Megatron stacks",
                            std::string(dtype_name(entry.meta.dtype)) + " as for '" +
                                printable(contents_.tensors[first].meta.fqn) + "'",
                            dtype_name(dtype), "cast them to one dtype");
    }
    entry.meta = {place.key, dtype, place.shape_of(tensor.meta.shape)};
    for (const Piece& piece : tensor.pieces) {
      const Box& box = std::get<Box>(piece.region);
      std::vector<std::int64_t> offsets = place.index;
      offsets.insert(offsets.end(), box.offsets.begin(), box.offsets.end());
      std::vector<std::int64_t> sizes(place.index.size(), 1);
      sizes.insert(sizes.end(), box.sizes.begin(), box.sizes.end());
      entry.pieces.push_back({Box{Shape(offsets), Shape(sizes)}, piece.rank});
    }
  }

  void add_tensor(std::size_t t, const TorchDistPlace& place) {
    add_tensor(t, place, contents_.tensors[t].meta.dtype);
  }

  void add_weight(const TorchDistNames& names, const std::string& name) {
    const std::size_t t = weight_tensors_.at(name);
    const DType dtype = contents_.tensors[t].meta.dtype;
    for (TorchDistPlace place : names.places_of(name)) {
      add_tensor(t, place);
      if (copies_.empty() || !trained_.contains(name) || with_copy_.contains(name)) continue;
      place.key = "optimizer.state." + copies_ + "." + place.key;
      // A source with the optimizer's own copy already has a tensor of this name.
      if (source_has(place.key)) continue;
      const bool is_widened = dtype == DType::bfloat16 || dtype == DType::float16;
      add_tensor(t, place, is_widened ? DType::float32 : dtype);
      if (is_widened) sorted_.widened.insert(name);
    }
  }
  bool source_has(const std::string& name) const { return contents_.find_tensor(name) != nullptr; }

  /// Adds all tensors but the weights.
  void add_state(const TorchDistNames& names) {
    const std::string copies = name_of_copies();
    for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
      const TensorMeta& meta = contents_.tensors[t].meta;
      std::string_view rest = meta.fqn;
      if (take_optimizer(rest)) {
        if (add_of_optimizer(names, t, rest, copies)) continue;
      } else if (are_weights_[t]) {
        continue;
      }
      add_tensor(t, {.key = meta.fqn});
    }
    require_one_optimizer();
    if (trained_.empty()) return;
    sorted_.common.set_optimizer(std::ranges::any_of(trained_, [](const std::string& name) {
      return name.find(".experts.") != std::string::npos;
    }));
    copies_ = copies;
  }

  /// Remembers an entry of the optimizer that goes into `common.pt`.
  void note_of_optimizer(const std::string& name) { of_optimizer_.insert(name); }
  /// Remembers an entry's optimizer, `optim` or `optimizer`, and the first entry with it.
  void note_root(const std::string& name) { roots_.emplace(name.substr(0, name.find('.')), name); }

  /// Throws if the checkpoint has two optimizers, or parts of one without the state of any weight:
  /// Megatron has no place for these.
  void require_one_optimizer() const {
    if (roots_.size() > 1) {
      throw Error::expected(ErrorKind::unsupported,
                            {.path = destination_, .fqn = roots_.rbegin()->second}, "optimizers",
                            "one optimizer, as Megatron has",
                            "a second one, with '" + roots_.begin()->second + "'", "leave one out");
    }
    if (!trained_.empty() || of_optimizer_.empty() || has_common_file_) return;
    const std::string& first = *of_optimizer_.begin();
    const std::size_t num_others = of_optimizer_.size() - 1;
    const std::string others =
        num_others == 0 ? "" : " and " + std::to_string(num_others) + " more";
    // Names the whole optimizer: if only the first entry were left out, the next would be refused.
    throw Error::expected(
        ErrorKind::unsupported, {.path = destination_, .fqn = first.substr(0, first.find('.'))},
        "a part of the optimizer",
        "also state of a weight, in the shape of the weight, such "
        "as optim.state.<weight>.exp_avg",
        "only '" + printable(first) + "'" + others, "leave out the whole optimizer");
  }

  /// Adds a tensor `<optimizer>.<rest>`. Returns false if Megatron has no place for it. `copies`:
  /// what Megatron calls the copies of the weights.
  bool add_of_optimizer(const TorchDistNames& names, std::size_t t, std::string_view rest,
                        const std::string& copies) {
    const TensorMeta& meta = contents_.tensors[t].meta;
    if (auto path = scaler_path(rest); path && meta.numel() == 1 && !has_common_file_) {
      sorted_.common.add_tensor(*std::move(path), meta, t);
      sorted_.of_common.insert(t);
      note_of_optimizer(meta.fqn);
      return true;
    }
    if (!take_prefix(rest, kState)) return false;
    if ((is_renamed_ || !has_common_file_) && add_named_as_in_torch_dist(names, t, rest, copies)) {
      return true;
    }
    const std::size_t dot = rest.rfind('.');
    if (dot == std::string_view::npos) return false;
    const std::string weight(rest.substr(0, dot));
    std::string kind(rest.substr(dot + 1));
    const auto found = weights_.find(weight);
    if (found == weights_.end()) return false;
    if (kind == kStep && holds_number(meta)) {
      sorted_.steps.insert(t);
      sorted_.of_common.insert(t);
      note_of_optimizer(meta.fqn);
      return true;
    }
    if (meta.shape != found->second.shape) return false;
    trained_.insert(weight);
    note_root(meta.fqn);
    if (std::ranges::find(kCopies, kind) != kCopies.end() && !copies.empty()) {
      kind = copies;
      with_copy_.insert(weight);
    }
    for (TorchDistPlace place : names.places_of(weight)) {
      place.key = "optimizer.state." + kind + "." + place.key;
      add_tensor(t, place);
    }
    return true;
  }

  /// Adds state `<kind>.<weight>`, to be stacked as the weight. Returns false for other names.
  bool add_named_as_in_torch_dist(const TorchDistNames& names, std::size_t t, std::string_view rest,
                                  const std::string& copies) {
    const std::size_t dot = rest.find('.');
    if (dot == std::string_view::npos) return false;
    const auto found = weights_.find(std::string(rest.substr(dot + 1)));
    if (found == weights_.end() || contents_.tensors[t].meta.shape != found->second.shape) {
      return false;
    }
    std::string kind(rest.substr(0, dot));
    if (!has_common_file_) {  // `common.pt` is written, and describes the optimizer
      trained_.insert(found->first);
      note_root(contents_.tensors[t].meta.fqn);
      if (std::ranges::find(kCopies, kind) != kCopies.end() && !copies.empty()) {
        kind = copies;
        with_copy_.insert(found->first);
      }
    }
    for (TorchDistPlace place : names.places_of(found->first)) {
      place.key = "optimizer.state." + kind + "." + place.key;
      add_tensor(t, place);
    }
    return true;
  }

  /// Returns what Megatron calls the optimizer's copy of the weights in fp32: `param` in the
  /// distributed optimizer, `fp32_param` in the one for 16 bits, none in the one for fp32.
  std::string name_of_copies() const {
    const Value* const distributed = sorted_.common.find_arg("use_distributed_optimizer");
    const auto* const is_distributed =
        distributed == nullptr ? nullptr : distributed->get_if<bool>();
    if (is_distributed == nullptr || *is_distributed) return "param";
    const Value* const dtype = sorted_.common.find_arg("params_dtype");
    const auto* const symbol = dtype == nullptr ? nullptr : dtype->get_if<Value::Symbol>();
    return symbol != nullptr && symbol->name == "torch.float32" ? "" : "fp32_param";
  }

  void add_object(std::string name, Value value) {
    objects_.insert_or_assign(std::move(name), std::move(value));
  }

  void add_value(std::size_t v) {
    const ValueEntry& entry = contents_.values[v];
    const Value& value = values_[v];
    std::string_view rest = entry.name;
    const bool is_object = rest.find(kShard) != std::string_view::npos || has_common_file_;
    if (!is_object && rest.ends_with(kExtraState) && value.is<Value::None>()) return;
    if (is_object || is_rank_or_extra_state(rest) || rest.starts_with(kModelPrefix) ||
        rest == "optimizer") {
      add_object(entry.name, value);
    } else if (entry.name == "args" && value.is<Value::Dict>()) {
      for (const auto& [key, item] : *value.get_if<Value::Dict>()) {
        const auto* const field = key.get_if<std::string>();
        if (field != nullptr) sorted_.common.add({"args", *field}, item);
      }
    } else if (take_optimizer(rest)) {
      add_value_of_optimizer(entry, rest, value);
    } else {
      KeyPath path = entry.key_path;
      if (path.empty()) path.emplace_back(entry.name);
      sorted_.common.add(std::move(path), value);
    }
  }

  void add_value_of_optimizer(const ValueEntry& entry, std::string_view rest, const Value& value) {
    auto path = scaler_path(rest);
    if (take_prefix(rest, kGroupsKey)) {
      take_prefix(rest, ".");
      if (!add_groups(entry, rest, value)) return add_object(entry.name, value);
      note_root(entry.name);
    } else if (rest.starts_with(kState) && rest.ends_with(".step") && as_number(value)) {
      sorted_.common.set_step(entry.name, *as_number(value));
    } else if (path && entry.key_path.size() > 1) {
      const auto scaler = std::ranges::find(entry.key_path, Key(kScaler));
      if (scaler != entry.key_path.end()) {  // the keys below it may be other than strings
        path->erase(std::ranges::find(*path, Key(kScaler)), path->end());
        path->insert(path->end(), scaler, entry.key_path.end());
      }
      sorted_.common.add(*std::move(path), value);
    } else {
      return add_object(entry.name, value);
    }
    note_of_optimizer(entry.name);
  }

  /// Adds the parameter groups, one group, or a field of one. `rest`: the name after
  /// `param_groups`. Returns false for another value.
  bool add_groups(const ValueEntry& entry, std::string_view rest, const Value& value) {
    if (rest.empty()) {
      const auto* const groups = value.get_if<Value::List>();
      if (groups == nullptr) return false;
      for (std::size_t g = 0; g < groups->size(); ++g) {
        if (!add_group(static_cast<std::int64_t>(g), (*groups)[g])) return false;
      }
      return true;
    }
    const auto number = take_number(rest);
    if (!number) return false;
    if (rest.empty()) return add_group(*number, value);
    add_group_field(*number, path_behind_group(entry, rest), value);
    return true;
  }

  bool add_group(std::int64_t number, const Value& group) {
    const auto* const fields = group.get_if<Value::Dict>();
    if (fields == nullptr) return false;
    for (const auto& [key, item] : *fields) {
      if (const auto* const field = key.get_if<std::string>()) {
        add_group_field(number, {*field}, item);
      }
    }
    return true;
  }

  void add_group_field(std::int64_t group, KeyPath path, const Value& value) {
    if (path.front() == Key("params")) return add_group_parameters(group, value);
    if (path == KeyPath{std::string(kStep)} && as_number(value)) {
      sorted_.common.set_step("optim.param_groups", *as_number(value));
    }
    sorted_.common.add_group_field(group, std::move(path), value);
  }

  void add_group_parameters(std::int64_t group, const Value& params) {
    const auto* const names = params.get_if<Value::List>();
    if (names == nullptr) return;
    for (const Value& name : *names) {
      if (const auto* const text = name.get_if<std::string>()) {
        sorted_.common.add_group_parameter(group, *text);
      }
    }
  }

  /// Finds the weights that get the fields of another parameter group. Megatron gives vectors and
  /// biases no weight decay, and all others some.
  void find_regrouped() {
    if (trained_.empty() || has_common_file_) return;
    sorted_.regrouped = sorted_.common.regrouped([&](const std::string& name) {
      const auto weight = weights_.find(name);
      const bool is_vector = weight != weights_.end() && weight->second.shape.size() == 1;
      return !is_vector && !name.ends_with(".bias");
    });
    std::erase_if(sorted_.regrouped,
                  [&](const std::string& name) { return !trained_.contains(name); });
  }

  /// Returns the keys of an entry below its parameter group: several if the field is a dict. `rest`
  /// spells them.
  static KeyPath path_behind_group(const ValueEntry& entry, std::string_view rest) {
    const auto groups = std::ranges::find(entry.key_path, Key(std::string(kGroupsKey)));
    if (entry.key_path.end() - groups < 3) return {std::string(rest)};
    return {groups + 2, entry.key_path.end()};
  }

  /// Throws if a stack lacks layers or experts: state of an optimizer, whose other layers are
  /// frozen. Neither Megatron nor PyTorch can load such a stack.
  void require_whole_stacks() const {
    for (const auto& [key, sources] : sorted_.sources) {
      const auto& [index, first] = *sources.begin();
      const Shape& shape = tensors_.at(key).meta.shape;
      std::int64_t num_slices = 1;
      for (std::size_t d = 0; d < index.size(); ++d) num_slices *= shape[d];
      if (std::cmp_equal(sources.size(), num_slices)) continue;
      throw Error::expected(ErrorKind::unsupported,
                            {.path = destination_, .fqn = contents_.tensors[first].meta.fqn},
                            "layers of '" + printable(key) + "', which Megatron stacks",
                            "state of all " + std::to_string(num_slices),
                            "of " + std::to_string(sources.size()), "leave out the optimizer");
    }
  }

  void finish_dcp() {
    require_whole_stacks();
    sorted_.dcp.world_size = contents_.world_size;
    for (auto& [name, tensor] : tensors_) sorted_.dcp.tensors.push_back(std::move(tensor));
    for (auto& [name, value] : objects_) {
      sorted_.dcp.values.push_back({name, {}});
      sorted_.dcp_values.push_back(std::move(value));
    }
  }

  const CheckpointContents& contents_;
  const std::vector<Value>& values_;
  const std::string& destination_;
  const CopiedFiles& copied_;
  const bool has_common_file_;
  bool is_torch_dist_ = false;  // the source is such a checkpoint, with its own names
  /// Recipes took the source from torch_dist to other names and back: it has `common.pt`, but
  /// neither objects nor stacked layers.
  bool is_renamed_ = false;
  std::vector<bool> are_weights_;  // by tensor
  std::map<std::string, TensorMeta> weights_;
  std::map<std::string, std::size_t> weight_tensors_;
  std::set<std::string> trained_;             // the weights with state
  std::set<std::string> with_copy_;           // the weights with an fp32 copy in the state
  std::map<std::string, std::string> roots_;  // by optimizer (`optim`): its first entry
  std::set<std::string> of_optimizer_;        // the entries of the optimizer in `common.pt`
  std::string copies_;                        // the name of fp32 copies of weights; empty: none
  std::map<std::string, TensorEntry> tensors_;
  std::map<std::string, Value> objects_;
  TorchDistContents sorted_;
};

}  // namespace

TorchDistContents sort_for_torch_dist(const CheckpointContents& contents,
                                      const std::vector<Value>& values,
                                      const std::string& destination, const CopiedFiles& copied) {
  return Sorter(contents, values, destination, copied).sort();
}

}  // namespace tessera::formats::megatron
