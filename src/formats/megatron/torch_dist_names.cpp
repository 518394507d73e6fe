#include "formats/megatron/torch_dist_names.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::formats::megatron {
namespace {

constexpr std::string_view kLocalExperts = "experts.local_experts.";

/// A number in a name, and what is before and behind it.
struct Numbered {
  std::string before;
  std::int64_t number;
  std::string behind;
};

/// Splits a name at the number that follows `word`, where `word` begins a component of the name.
std::optional<Numbered> split_at_number(const std::string& name, std::string_view word) {
  for (std::size_t at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
    if (at != 0 && name[at - 1] != '.') continue;
    const std::size_t begin = at + word.size();
    std::int64_t number = 0;
    const char* const end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + begin, end, number);
    if (error != std::errc() || stop == end || *stop != '.' || number < 0) continue;
    return Numbered{name.substr(0, begin), number, std::string(stop + 1, end)};
  }
  return std::nullopt;
}

/// Splits `…experts.linear_fc1.weight3`, a name of a grouped layer, before its last number. Inserts
/// `experts.`, as Megatron stores it: `…experts.experts.linear_fc1.weight`.
std::optional<Numbered> split_at_last_number(const std::string& name) {
  const std::size_t digits = name.find_last_not_of("0123456789") + 1;
  if (digits == 0 || digits == name.size() || name.size() - digits > 9) return std::nullopt;
  std::string before = name.substr(0, digits);
  const std::size_t experts = before.rfind("experts.linear_fc");
  const bool is_of_experts = experts != std::string::npos && experts != 0 &&
                             before[experts - 1] == '.' &&
                             (before.ends_with(".weight") || before.ends_with(".bias"));
  if (!is_of_experts) return std::nullopt;
  before.insert(experts, "experts.");
  return Numbered{std::move(before), std::stoll(name.substr(digits)), {}};
}

/// A weight's name, with the numbers of its layer and of its expert taken out.
struct ParsedName {
  std::string block{};                  // `decoder.layers.`; empty: not of a layer to be stacked
  std::optional<std::int64_t> layer{};  // empty if `block` is empty
  std::string rest{};                   // the name after the layer's number
  std::optional<std::int64_t> expert{};
};

ParsedName parse(const std::string& name) {
  ParsedName parsed;
  parsed.rest = name;
  if (auto layer = split_at_number(name, kLayers); layer && !layer->before.starts_with("mtp.")) {
    parsed = {std::move(layer->before), layer->number, std::move(layer->behind), {}};
  }
  if (auto expert = split_at_number(parsed.rest, kLocalExperts)) {
    std::string before = expert->before.substr(0, expert->before.size() - kLocalExperts.size());
    parsed.rest = before + std::string(kStackedExperts) + expert->behind;
    parsed.expert = expert->number;
  } else if (auto grouped = split_at_last_number(parsed.rest)) {
    parsed.rest = std::move(grouped->before);
    parsed.expert = grouped->number;
  }
  const std::size_t mtp = parsed.rest.find(kMtpModule);
  if (parsed.block.empty() && parsed.rest.starts_with("mtp.") && mtp != std::string::npos) {
    parsed.rest.replace(mtp, kMtpModule.size(), kMtpStored);
  }
  return parsed;
}

/// What must be equal for tensors to be stacked.
using Signature = std::tuple<std::int64_t, Shape, DType>;  // number of experts, shape, dtype

/// The weights of all layers of a block: by the name behind the layer's number, then by layer.
using Block = std::map<std::string, std::map<std::int64_t, Signature>>;

bool are_alike(const Block& block) {
  std::int64_t num_layers = 0;
  for (const auto& [rest, layers] : block) {
    num_layers = std::max(num_layers, layers.rbegin()->first + 1);
  }
  return std::ranges::all_of(block, [&](const auto& entry) {
    const auto& layers = entry.second;
    return std::cmp_equal(layers.size(), num_layers) &&
           std::ranges::all_of(
               layers, [&](const auto& layer) { return layer.second == layers.begin()->second; });
  });
}

/// Returns the names under which Megatron stores the weight `rest` of a layer: only `rest`, except
/// for some norms. `has` tells whether the layer has a weight.
std::vector<std::string> stored_names(const std::string& rest, const auto& has) {
  const auto within = [&](std::string_view norm,
                          std::string_view fused) -> std::optional<std::string> {
    const std::size_t at = rest.rfind(norm);
    if (at == std::string::npos || (at != 0 && rest[at - 1] != '.')) return std::nullopt;
    return rest.substr(0, at) + std::string(fused) + rest.substr(at + norm.size());
  };
  const auto before = [&](std::string_view norm) { return rest.substr(0, rest.rfind(norm)); };
  if (const auto fused = within("input_layernorm.", "self_attention.linear_qkv.layer_norm_")) {
    const bool is_fused = has(before("input_layernorm.") + "self_attention.linear_qkv.weight");
    return {is_fused ? *fused : rest};
  }
  if (const auto fused = within("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")) {
    const std::string layer = before("pre_mlp_layernorm.");
    const bool is_dense = has(layer + "mlp.linear_fc1.weight");
    if (is_dense && has(layer + "self_attention.linear_qkv.weight")) return {*fused};
    return {rest, *fused};
  }
  for (const std::string_view part : {"q", "kv"}) {
    const std::string norm = "self_attention." + std::string(part) + "_layernorm.";
    const std::string linear = "self_attention.linear_" + std::string(part) + "_up_proj.";
    const auto fused = within(norm, linear + "layer_norm_");
    if (fused && has(before(norm) + linear + "weight")) return {rest, *fused};
  }
  return {rest};
}

std::string in_words(const TensorMeta& meta) {
  return std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape);
}

std::string joined(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (const std::int64_t number : numbers) {
    text += (text.empty() ? "" : ".") + std::to_string(number);
  }
  return text;
}

}  // namespace

Shape TorchDistPlace::shape_of(const Shape& weight) const {
  std::vector<std::int64_t> shape = stacked;
  shape.insert(shape.end(), weight.begin(), weight.end());
  return shape;
}

TorchDistNames::TorchDistNames(const std::map<std::string, TensorMeta>& weights,
                               const std::string& destination, LayerNames layer_names) {
  std::map<std::string, ParsedName> parsed;
  // By block, layer and rest: the name of each expert, by its number.
  std::map<std::tuple<std::string, std::int64_t, std::string>, std::map<std::int64_t, std::string>>
      experts;
  for (const auto& [name, meta] : weights) {
    const ParsedName& each = parsed.emplace(name, parse(name)).first->second;
    experts[{each.block, each.layer.value_or(0), each.rest}].emplace(each.expert.value_or(0), name);
  }
  std::map<std::string, Block> blocks;
  for (const auto& [where, names] : experts) {
    const auto& [block, layer, rest] = where;
    const TensorMeta& first = weights.at(names.begin()->second);
    for (const auto& [number, name] : names) {
      const TensorMeta& meta = weights.at(name);
      if (meta.shape == first.shape && meta.dtype == first.dtype) continue;
      throw Error::expected(ErrorKind::unsupported, {.path = destination, .fqn = name}, "experts",
                            in_words(first) + " as in '" + first.fqn + "'", in_words(meta));
    }
    if (!std::cmp_equal(names.rbegin()->first + 1, names.size())) {
      throw Error::expected(ErrorKind::unsupported,
                            {.path = destination, .fqn = names.begin()->second}, "experts",
                            "all experts from 0 to " + std::to_string(names.rbegin()->first),
                            std::to_string(names.size()) + " of them");
    }
    if (!block.empty()) {
      blocks[block][rest][layer] = {std::ssize(names), first.shape, first.dtype};
    }
  }
  are_layers_stacked_ =
      layer_names != LayerNames::numbered &&
      std::ranges::all_of(blocks, [](const auto& block) { return are_alike(block.second); });

  for (const auto& [name, each] : parsed) {
    const std::string number =
        each.layer && !are_layers_stacked_ ? std::to_string(*each.layer) + "." : "";
    const std::int64_t layer = each.layer.value_or(0);
    TorchDistPlace place;
    if (each.layer && are_layers_stacked_) {
      place.index.push_back(layer);
      place.stacked.push_back(std::ssize(blocks[each.block][each.rest]));
    }
    if (each.expert) {
      place.index.push_back(*each.expert);
      place.stacked.push_back(std::ssize(experts.at({each.block, layer, each.rest})));
    }
    const auto has = [&](const std::string& rest) {
      return experts.contains({each.block, layer, rest});
    };
    for (const std::string& rest : stored_names(each.rest, has)) {
      place.key = each.block + number + rest;
      places_[name].push_back(place);
    }
  }
}

std::vector<std::string> TorchDistNames::extra_states() const {
  std::set<std::string> names;
  for (const auto& [weight, places] : places_) {
    const TorchDistPlace& place = places.front();
    constexpr std::string_view kWeight = ".weight";
    if (!place.key.ends_with(kWeight) || place.key.find(kLayers) == std::string::npos) continue;
    const std::string module = place.key.substr(0, place.key.size() - kWeight.size());
    const std::string last = module.substr(module.rfind('.') + 1);
    if (!last.starts_with("linear_") && last != "eh_proj") continue;
    const std::string shard =
        place.index.empty() ? "0_1" : joined(place.index) + "_" + joined(place.stacked);
    names.insert(module + "._extra_state/shard_" + shard);
  }
  return {names.begin(), names.end()};
}

}  // namespace tessera::formats::megatron
