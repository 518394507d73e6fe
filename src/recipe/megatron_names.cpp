#include "recipe/megatron_names.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "formats/megatron/torch_dist_names.h"
#include "recipe/inputs.h"
#include "reshard/optimizer_rules.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointContents;
using formats::megatron::kLayers;
using formats::megatron::kMtpModule;
using formats::megatron::kMtpStored;
using formats::megatron::kShard;
using formats::megatron::kStackedExperts;

constexpr std::string_view kDigits = "0123456789";
constexpr std::string_view kExtraState = "_extra_state";

/// A part of a name in torch_dist or of TransformerEngine's layers, and the recipes' name for it.
struct Spelling {
  std::string_view stored;
  std::string_view own;
};
constexpr std::array kNorms = {
    Spelling{"self_attention.linear_qkv.layer_norm_", "input_layernorm."},
    Spelling{"mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."},
    Spelling{"self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."},
    Spelling{"self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."},
};

/// Returns where `part` begins in `name`, at the begin of a component.
std::size_t find_component(std::string_view name, std::string_view part) {
  std::size_t at = name.find(part);
  while (at != std::string_view::npos && at != 0 && name[at - 1] != '.') {
    at = name.find(part, at + 1);
  }
  return at;
}

/// What becomes of a tensor: its name in the recipe, in which `{L}` and `{E}` stand for the numbers
/// of the layers and experts that are stacked in it.
struct Place {
  std::string name;
  std::vector<Operation> operations{};
};

/// Inserts `{L}.` after the component `layers` of a name, unless the number of a layer follows it.
void unstack_layers(Place& place) {
  const std::size_t at = find_component(place.name, kLayers);
  const std::size_t behind = at + kLayers.size();
  if (at == std::string::npos || behind >= place.name.size()) return;
  if (kDigits.find(place.name[behind]) != std::string_view::npos) return;
  place.name.insert(behind, "{L}.");
  place.operations.emplace_back(Unstack{"L", 0});
}

/// Gives experts the names `local_experts.<number>`: `{E}` if they are stacked in one tensor.
void unstack_experts(Place& place) {
  if (const std::size_t at = find_component(place.name, kStackedExperts); at != std::string::npos) {
    place.name.replace(at, kStackedExperts.size(), "experts.local_experts.{E}.");
    place.operations.emplace_back(Unstack{"E", 0});
    return;
  }
  // TransformerEngine's grouped layers: `experts.linear_fc1.weight3`.
  const std::size_t at = find_component(place.name, "experts.linear_fc");
  const std::size_t digits = place.name.find_last_not_of(kDigits) + 1;
  if (at == std::string::npos || digits == place.name.size()) return;
  const std::string number = place.name.substr(digits);
  place.name.resize(digits);
  if (!place.name.ends_with(".weight") && !place.name.ends_with(".bias")) return;
  place.name.insert(at + std::string_view("experts.").size(), "local_experts." + number + ".");
}

/// Returns the place of a tensor. A tensor with too few dimensions to unstack keeps its name.
Place place_of(const std::string& name, std::size_t num_dims) {
  Place place{name};
  unstack_layers(place);
  unstack_experts(place);
  if (place.operations.size() > num_dims) return {name};
  const std::size_t mtp = place.name.find(kMtpModule);
  if (mtp != std::string::npos && find_component(place.name, "mtp.layers.") < mtp) {
    place.name.replace(mtp, kMtpModule.size(), kMtpStored);
  }
  for (const Spelling& norm : kNorms) {
    const std::size_t at = find_component(place.name, norm.stored);
    if (at == std::string::npos) continue;
    place.name.replace(at, norm.stored.size(), norm.own);
    break;
  }
  return place;
}

class RulesBuilder {
 public:
  RulesBuilder(std::string recipe_path, std::string path) : path_(std::move(path)) {
    rules_.path = std::move(recipe_path);
    rules_.rest = Rest::keep;
  }

  void add_tensor(const std::string& name, std::size_t num_dims) {
    if (name.find_first_of("{}") != std::string::npos) return;  // a template cannot have them
    if (name.ends_with(kExtraState) || reshard::is_in_flat_buffers(name)) return drop(name);
    Place place = place_of(name, num_dims);
    auto& [operations, sources] = places_[place.name];
    operations = std::move(place.operations);
    is_needed_ = is_needed_ || place.name != name || !operations.empty();
    sources.push_back(name);
  }
  void add_value(const std::string& name) {
    if (name.find_first_of("{}") != std::string::npos) return;
    if (name.ends_with(kExtraState) || name.find(kShard) != std::string::npos) drop(name);
  }

  std::optional<Rules> take() {
    if (!is_needed_) return std::nullopt;
    for (auto& [name, place] : places_) {
      auto& [operations, sources] = place;
      const bool is_renamed = sources.size() > 1 || sources.front() != name;
      if (!is_renamed && operations.empty()) continue;  // "rest" keeps it
      Rule rule{.number = kMegatronRule};
      for (const std::string& source : sources) rule.from.push_back(parsed(source, source));
      rule.to.push_back(parsed(name, sources.front()));
      if (sources.size() > 1) rule.operations.emplace_back(MergeEqual{sources.size()});
      std::ranges::move(operations, std::back_inserter(rule.operations));
      rules_.rules.push_back(std::move(rule));
    }
    return std::move(rules_);
  }

 private:
  using Sources = std::vector<std::string>;

  /// Drops all names that differ from `name` only in numbers: there may be one for each expert.
  void drop(const std::string& name) {
    is_needed_ = true;
    const std::string pattern = with_captures(name);
    if (!dropped_.insert(pattern).second) return;
    rules_.rules.push_back({.number = kMegatronRule, .from = {parsed(pattern, name)}});
  }

  /// Returns `text`, made of the name of an entry, as a template.
  NameTemplate parsed(const std::string& text, const std::string& name) const {
    auto form = NameTemplate::parse(text);
    if (auto* const result = std::get_if<NameTemplate>(&form)) return std::move(*result);
    const auto& [expected, found] = std::get<NameTemplate::Problem>(form);
    throw Error::expected(ErrorKind::unsupported, {.path = path_, .fqn = name},
                          rule_name(kMegatronRule), expected, found);
  }

  std::string path_;
  Rules rules_;
  bool is_needed_ = false;
  std::set<std::string> dropped_;  // patterns
  std::map<std::string, std::pair<std::vector<Operation>, Sources>>
      places_;  // by name in the recipe
};

}  // namespace

std::string with_captures(const std::string& name) {
  constexpr std::size_t kMaxCaptures = 26;
  constexpr std::string_view kSeparators = "._/";
  std::string pattern;
  std::size_t num_captures = 0;
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t end = std::min(name.find_first_not_of(kDigits, at), name.size());
    const bool begins = at == 0 || kSeparators.find(name[at - 1]) != std::string_view::npos;
    const bool ends = end == name.size() || kSeparators.find(name[end]) != std::string_view::npos;
    const bool is_number = NameTemplate::can_be_number(name.substr(at, end - at));
    if (is_number && begins && ends && num_captures < kMaxCaptures) {
      pattern += {'{', static_cast<char>('A' + num_captures++), '}'};
    } else {
      pattern += name.substr(at, std::max(end, at + 1) - at);
    }
    at = std::max(end, at + 1);
  }
  return pattern.size() > NameTemplate::kMaxNameNbytes ? name : pattern;
}

bool is_from_megatron(const Recipe& recipe, Direction direction) {
  const auto& side = RecipeAccess::parsed(recipe).megatron;
  return direction == Direction::forward ? side == Side::from : side == Side::to;
}

bool is_to_megatron(const Recipe& recipe, Direction direction) {
  const auto& side = RecipeAccess::parsed(recipe).megatron;
  return direction == Direction::forward ? side == Side::to : side == Side::from;
}

std::optional<Rules> rules_for_megatron(const Recipe& recipe, Direction direction,
                                        const CheckpointContents& contents,
                                        const std::string& path) {
  if (!is_from_megatron(recipe, direction)) return std::nullopt;
  RulesBuilder builder(recipe.path(), path);
  const Inputs inputs(contents);
  for (const Input& input : inputs.all()) {
    builder.add_tensor(*input.name, contents.tensors[input.tensor].meta.shape.size());
  }
  for (const formats::ValueEntry& value : contents.values) builder.add_value(value.name);
  return builder.take();
}

}  // namespace tessera::recipe
