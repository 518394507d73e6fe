#include "formats/megatron/cuts_by_name.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace tessera::formats::megatron {
namespace {

/// Modules whose weight and bias are cut along the first dimension.
constexpr std::array<std::string_view, 15> kFirst = {
    "linear_qkv",        "linear_q",   "linear_kv", "linear_q_proj",   "linear_q_up_proj",
    "linear_kv_up_proj", "linear_fc1", "eh_proj",   "word_embeddings", "output_layer",
    "query_key_value",   "query",      "key_value", "dense_h_to_4h",   "word_embeddings_for_head"};
/// Modules whose weight is cut along the second dimension; each rank has the whole bias.
constexpr std::array<std::string_view, 3> kSecond = {"linear_proj", "linear_fc2", "dense_4h_to_h"};
constexpr std::array<std::string_view, 3> kAttention = {"self_attention", "attention",
                                                        "inter_attention"};
/// Modules that are not cut: each rank has the whole parameter.
constexpr std::array<std::string_view, 4> kWhole = {"position_embeddings", "tokentype_embeddings",
                                                    "router", "shared_experts"};
/// Parameters of layers with a state space (Mamba, gated delta nets). Each rank has parts of
/// several matrices, one after the other in one tensor.
constexpr std::array<std::string_view, 5> kOfStateSpaces = {"in_proj", "conv1d", "A_log", "dt_bias",
                                                            "D"};
constexpr std::array<std::string_view, 4> kBuffers = {"expert_bias", "local_tokens_per_expert",
                                                      "inv_freq", "global_tokens_per_expert"};

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& words, std::string_view word) {
  return std::ranges::find(words, word) != words.end();
}

/// Removes the last component of a name, and returns it: `weight` of `linear_fc1.weight`.
std::string_view take_last(std::string_view& name) {
  const std::size_t dot = name.rfind('.');
  const std::string_view last = dot == std::string_view::npos ? name : name.substr(dot + 1);
  name = dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
  return last;
}

std::string_view without_digits(std::string_view word) {
  while (!word.empty() && word.back() >= '0' && word.back() <= '9') word.remove_suffix(1);
  return word;
}

bool has_component(std::string_view name, std::string_view component) {
  while (!name.empty()) {
    if (take_last(name) == component) return true;
  }
  return false;
}

/// Returns the number that follows `word` in a name and has a dot after it: 3 for `layers.` in
/// `layers.3.mlp`. Nothing if there is none.
std::optional<NumberInName> number_behind(std::string_view name, std::string_view word) {
  for (std::size_t at = name.find(word); at != std::string_view::npos;
       at = name.find(word, at + 1)) {
    if (at > 0 && name[at - 1] != '.') continue;
    const std::size_t begin = at + word.size();
    std::size_t number = 0;
    const auto [end, error] =
        std::from_chars(name.data() + begin, name.data() + name.size(), number);
    const auto after = static_cast<std::size_t>(end - name.data());
    if (error != std::errc{} || after == name.size() || name[after] != '.') continue;
    return NumberInName{std::string(name.substr(0, begin)), number,
                        std::string(name.substr(after))};
  }
  return std::nullopt;
}

}  // namespace

Cut cut_of(std::string_view name) {
  if (expert_in(name) || is_of_expert(name)) {
    // GroupedMLP keeps the weights of all experts in one matrix. This reader does not join such
    // parts of several ranks.
    if (name.ends_with("experts.weight1") || name.ends_with("experts.weight2")) {
      return Cut::not_joined;
    }
  }
  const bool is_in_mixer = has_component(name, "mixer");
  std::string_view rest = name;
  const std::string_view parameter = take_last(rest);
  const std::string_view module = take_last(rest);
  const std::string_view parent = take_last(rest);
  if (is_in_mixer || contains(kOfStateSpaces, parameter) || contains(kOfStateSpaces, module)) {
    return Cut::not_joined;
  }
  const std::string_view kind = is_of_expert(name) ? without_digits(parameter) : parameter;
  const bool is_weight = kind == "weight";
  const bool is_bias = kind == "bias";
  if (contains(kFirst, module) && (is_weight || is_bias)) return Cut::first_dimension;
  if (module == "lm_head" && is_bias) return Cut::first_dimension;
  if (parameter == "softmax_offset") return Cut::first_dimension;  // a number for each head
  if (contains(kSecond, module) || (module == "dense" && contains(kAttention, parent))) {
    if (is_weight) return Cut::second_dimension;
    if (is_bias) return Cut::whole;
  }
  const bool is_of_norm =
      module.find("norm") != std::string_view::npos || parameter.starts_with("layer_norm_");
  if (is_of_norm || contains(kWhole, module) || contains(kBuffers, parameter)) return Cut::whole;
  return Cut::no_rule;
}

std::optional<std::string> second_of_perceptron(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kLayers = {
      {{"linear_fc1.", "linear_fc2."}, {"dense_h_to_4h.", "dense_4h_to_h."}}};
  for (const auto& [first, second] : kLayers) {
    const std::size_t at = name.rfind(first);
    if (at == std::string_view::npos || (at > 0 && name[at - 1] != '.')) continue;
    std::string_view parameter = name.substr(at + first.size());
    constexpr std::string_view kBias = "bias";
    std::string other = std::string(name.substr(0, at)) + std::string(second);
    if (parameter.starts_with("weight")) return other + std::string(parameter);
    if (parameter.starts_with(kBias)) {
      return other + "weight" + std::string(parameter.substr(kBias.size()));
    }
  }
  return std::nullopt;
}

bool is_of_module(std::string_view name, std::string_view module) {
  take_last(name);
  return take_last(name) == module;
}

bool is_of_shared_expert(std::string_view name) {
  return has_component(name, "shared_experts");
}

std::optional<NumberInName> layer_in(std::string_view name) {
  return number_behind(name, "layers.");
}

std::optional<NumberInName> expert_in(std::string_view name) {
  if (auto found = number_behind(name, "local_experts.")) return found;
  if (!is_of_expert(name)) return std::nullopt;
  const std::string_view before = without_digits(name);
  if (before.size() == name.size()) return std::nullopt;
  if (!before.ends_with(".weight") && !before.ends_with(".bias")) return std::nullopt;
  if (before.ends_with("experts.weight")) return std::nullopt;  // GroupedMLP
  NumberInName found{std::string(before), 0, {}};
  const auto [end, error] =
      std::from_chars(name.data() + before.size(), name.data() + name.size(), found.number);
  if (error != std::errc{}) return std::nullopt;
  return found;
}

bool is_of_expert(std::string_view name) {
  return has_component(name, "experts");
}

bool is_buffer(std::string_view name) {
  return contains(kBuffers, take_last(name));
}

}  // namespace tessera::formats::megatron
